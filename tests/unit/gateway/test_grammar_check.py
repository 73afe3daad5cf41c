"""Forms that would end a verifier are refused by a child process; forms that compile pass."""

import asyncio
import json

import pytest
from unit.gateway.service_for_tests import at_rest, collect, serving
from unit.gateway.tokenizers_for_tests import END, byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway import grammar_check
from gateway.grammar_check import GrammarCheck, beyond_limits, json_depth
from gateway.requests import GenerateRequest
from rootward.core.requests import Form, Structure
from rootward.errors import InvalidGrammar, Unavailable

pytest.importorskip("llguidance")
END_ID = byte_level().encode(END)[0]


def chain(length, key="$ref"):
    """A schema of so many definitions, each of which is the next one."""
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    if key != "$ref":
        links = {name: {key: [link] if key in ("allOf", "anyOf") else link} for name, link in links.items()}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}})


def rules(length):
    lines = [f'r{i}: "a" r{i + 1}' for i in range(length)]
    return "\n".join(["start: r0", *lines, f'r{length}: "b"'])


@pytest.fixture
async def check():
    made = GrammarCheck(byte_level().backend_json)

    async def ask(form, text, tenant=""):
        of = {"tenant": tenant} if tenant else {}
        await made.check(Structure(form, text), vocab_size=byte_level().num_ids, eos_ids=(END_ID,), **of)

    ask.owner = made
    yield ask
    await made.close()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Form.JSON_SCHEMA, chain(1000)),
        (Form.JSON_SCHEMA, chain(1000, "allOf")),
        (Form.JSON_SCHEMA, chain(1000, "anyOf")),
        (Form.JSON_SCHEMA, chain(1000, "items")),
        (Form.JSON_SCHEMA, '{"items":' * 972 + "{}" + "}" * 972),
        (Form.GRAMMAR, rules(5000)),
    ],
    ids=["ref", "allOf", "anyOf", "items", "nested", "lark"],
)
async def test_forms_beyond_the_static_limits_are_refused_without_a_child(check, form, text):
    with pytest.raises(InvalidGrammar, match="the limit is"):
        await check(form, text)
    assert check.owner._child is None


async def refused_as_late(check, monkeypatch, text):
    """A running compiler gets no time for this form."""
    await check(Form.REGEX, "a")
    monkeypatch.setattr(grammar_check, "COMPILE_S", 0.0)
    with pytest.raises(InvalidGrammar, match="does not compile within 0 s"):
        await check(Form.REGEX, text)
    monkeypatch.undo()


async def test_a_form_that_overflows_the_compiler_is_refused_and_the_next_one_is_served(check, monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_REFERENCES", 1 << 30)
    with pytest.raises(InvalidGrammar, match="overflows the compiler"):
        await check(Form.JSON_SCHEMA, chain(1000))
    assert check.owner._child is None
    with pytest.raises(InvalidGrammar, match="overflows the compiler"):
        await check(Form.JSON_SCHEMA, chain(1000))
    assert check.owner._child is None  # it is remembered: no child was asked
    await check(Form.JSON_SCHEMA, chain(20))
    await check(Form.REGEX, "[a-z]+")


async def test_the_vocabulary_is_read_before_the_time_of_the_first_form_begins():
    """On a busy machine that takes longer than a form may, and the form would be refused for a minute."""
    unreadable = GrammarCheck("no tokenizer")
    with pytest.raises(Unavailable, match="does not start"):
        await unreadable.check(Structure(Form.REGEX, "a"), vocab_size=10, eos_ids=(0,))
    await unreadable.close()


async def test_a_form_is_not_blamed_for_a_compiler_that_is_killed(check, monkeypatch):
    exchange, asked = grammar_check._exchange, []

    async def killed(child, question):
        if "form" in question and len(asked) < 1:
            child.kill()
        asked.append(question)
        return await exchange(child, question)

    await check(Form.REGEX, "a")
    monkeypatch.setattr(grammar_check, "_exchange", killed)
    await check(Form.REGEX, "b")
    assert ["form" in question for question in asked] == [True, False, True]


async def test_a_form_whose_check_failed_is_checked_again_later(check, monkeypatch):
    await refused_as_late(check, monkeypatch, "b")
    with pytest.raises(InvalidGrammar, match="within 0 s"):
        await check(Form.REGEX, "b")
    ((key, verdict),) = [(key, verdict) for key, verdict in check.owner._verdicts.items() if verdict.fix]
    check.owner._verdicts[key] = verdict._replace(until_s=verdict.until_s - grammar_check.FORGET_S)
    await check(Form.REGEX, "b")


async def test_a_compiler_that_ended_between_two_forms_is_started_again(check):
    await check(Form.REGEX, "a")
    ended = check.owner._child
    ended.kill()
    while not ended.stdin.is_closing():
        await asyncio.sleep(0.001)
    await check(Form.REGEX, "b")
    assert check.owner._child is not ended


async def test_a_compiler_that_ends_before_it_has_read_the_vocabulary_is_started_once_more(check, monkeypatch):
    start, commands = asyncio.create_subprocess_exec, []

    async def first_ends(*command, **streams):
        commands.append(command)
        return await start(*(("true",) if len(commands) == 1 else command), **streams)

    monkeypatch.setattr(grammar_check.asyncio, "create_subprocess_exec", first_ends)
    await check(Form.REGEX, "[0-9]{3}")
    assert len(commands) == 2


async def test_a_form_is_not_blamed_for_a_compiler_that_does_not_start(check, monkeypatch):
    start = asyncio.create_subprocess_exec
    monkeypatch.setattr(grammar_check.asyncio, "create_subprocess_exec", lambda *_, **streams: start("true", **streams))
    with pytest.raises(Unavailable, match="does not start"):
        await check(Form.REGEX, "[0-9]{3}")
    assert check.owner._child is None
    monkeypatch.undo()
    await check(Form.REGEX, "[0-9]{3}")


async def test_a_form_that_does_not_compile_in_time_is_refused(check, monkeypatch):
    await refused_as_late(check, monkeypatch, "b")
    await check(Form.REGEX, "c")


class Held:
    """Holds the questions to the compiler back; `asked` are the texts of their forms."""

    def __init__(self, monkeypatch):
        self.asked, self.free, self._exchange = [], asyncio.Event(), grammar_check._exchange
        monkeypatch.setattr(grammar_check, "_exchange", self)
        monkeypatch.setattr(grammar_check, "COMPILE_S", 600.0)

    async def __call__(self, child, question):
        if "form" in question:
            self.asked.append(question["text"])
            await self.free.wait()
        return await self._exchange(child, question)

    async def until_asked(self, number):
        async with asyncio.timeout(60):
            while len(self.asked) < number:
                await asyncio.sleep(0.001)


async def test_a_client_that_leaves_does_not_end_the_compiler_of_all(check, monkeypatch):
    """Each that left cost the others a start of the compiler, which takes a second."""
    await check(Form.REGEX, "a")
    child, held = check.owner._child, Held(monkeypatch)
    left, stays = (asyncio.create_task(check(Form.REGEX, text)) for text in "bc")
    await held.until_asked(1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    held.free.set()
    await stays
    assert check.owner._child is child
    await check(Form.REGEX, "b")
    assert held.asked == ["b", "c"]  # the form of the first client is known


async def test_a_form_that_is_known_waits_for_no_other(check, monkeypatch):
    await check(Form.REGEX, "known")
    held = Held(monkeypatch)
    slow = asyncio.create_task(check(Form.REGEX, "slow"))
    await held.until_asked(1)
    async with asyncio.timeout(60):
        await check(Form.REGEX, "known")
    assert not slow.done()
    held.free.set()
    await slow


async def test_tenants_take_turns_at_the_compiler(check, monkeypatch):
    """Forms of one tenant, each of which takes as long as it may, kept all others waiting for minutes."""
    await check(Form.REGEX, "a")
    held = Held(monkeypatch)
    tasks = [asyncio.create_task(check(Form.REGEX, f"many{i}", "many")) for i in range(5)]
    await held.until_asked(1)
    tasks.append(asyncio.create_task(check(Form.REGEX, "one", "one")))
    for _ in range(10):
        await asyncio.sleep(0)
    held.free.set()
    await asyncio.gather(*tasks)
    assert held.asked.index("one") <= 2
    assert not check.owner._turns


async def test_the_end_of_the_gateway_ends_a_form_that_is_being_compiled(check, monkeypatch):
    await check(Form.REGEX, "a")
    held = Held(monkeypatch)
    asking = asyncio.create_task(check(Form.REGEX, "b"))
    await held.until_asked(1)
    await check.owner.close()
    assert check.owner._child is None
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_the_error_of_a_form_that_does_not_compile_has_the_reason(check):
    with pytest.raises(InvalidGrammar, match="does not compile"):
        await check(Form.REGEX, "(")
    assert check.owner._child is not None  # it answered


async def test_no_verifier_is_asked_for_a_form_that_is_refused():
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        with pytest.raises(InvalidGrammar):
            await collect(service, GenerateRequest("a", structure=Structure(Form.JSON_SCHEMA, chain(1000))))
        await at_rest(service, verifier)
    assert not verifier.requests


@pytest.mark.parametrize(
    ("text", "depth"), [("{}", 1), ('{"a":[{}]}', 3), ('{"a":"[[["}', 1), ('{"a\\"[":[]}', 2), ("1", 0)]
)
def test_depth_counts_brackets_outside_strings(text, depth):
    assert json_depth(text) == depth


def test_ordinary_forms_are_within_the_limits():
    for form, text in ((Form.JSON_SCHEMA, chain(400)), (Form.GRAMMAR, rules(400)), (Form.JSON_OBJECT, "")):
        assert beyond_limits(Structure(form, text)) is None
