"""`rootward chat`: turns, commands, and how it goes on after a refusal."""

import asyncio

import pytest
from unit.gateway.service_for_tests import IDS, TEXT, at_rest, grpc_serving
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from rootward.cli.chat import Conversation
from rootward.cli.main import main
from rootward.errors import APIConnectionError, StreamInterruptedError


@pytest.fixture
def template(monkeypatch):
    said = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"
    monkeypatch.setattr(byte_level()._tokenizer, "chat_template", said)


@pytest.fixture
def talk(monkeypatch, capsys):
    async def talk(verifier, lines, *arguments):
        left = iter(lines)
        monkeypatch.setattr("builtins.input", lambda prompt="": _next(left))
        async with grpc_serving(verifier) as (service, address):
            code = await asyncio.to_thread(main, ["chat", "--url", address, *map(str, arguments)])
            await at_rest(service, verifier)
        assert code == 0
        prompts = [byte_level().decode(r.prompt) for r in verifier.requests]
        return prompts, *capsys.readouterr()

    return talk


def _next(lines):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None


async def test_turns_build_on_one_another(template, talk):
    verifier = SpellingVerifier(text="hi")
    lines = ["one", "/stats", "", "two", "/undo", "three", "/reset", "four", "/help", "/quit", "never said"]
    prompts, out, err = await talk(verifier, lines, "--system", "S", "--temperature", 0, "--max-tokens", 30)
    assert prompts == ["s:S;u:one;", "s:S;u:one;a:hi;u:two;", "s:S;u:one;a:hi;u:three;", "s:S;u:four;"]
    assert out.count("hi\n") == 4
    assert "block efficiency" in err
    assert "/undo" in err
    assert all((r.sampling.temperature, r.stopping.max_tokens) == (0, 30) for r in verifier.requests)


async def test_a_refusal_does_not_end_it(talk):
    prompts, _, err = await talk(SpellingVerifier(), ["one", "/stats", "/what"])
    assert not prompts
    assert "chat template" in err
    assert "nothing was answered yet" in err
    assert "/what: unknown" in err


async def test_an_unknown_command_is_shown_as_it_was_typed(talk):
    _, _, err = await talk(SpellingVerifier(), ["/x [/y] [red] :smile:", "/stats"])
    assert "/x [/y] [red] :smile:: unknown" in err
    assert "nothing was answered yet" in err


async def test_a_lost_connection_does_not_end_it_on_a_terminal(template, talk, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answer, lost = Conversation.answer, [APIConnectionError("no answer"), StreamInterruptedError("it broke", None)]

    def losing(self, text, console):
        if lost:
            raise lost.pop()
        answer(self, text, console)

    monkeypatch.setattr(Conversation, "answer", losing)
    prompts, out, err = await talk(SpellingVerifier(), ["one", "two", "three"])
    assert prompts == ["u:three;"]
    assert TEXT in out
    assert "it broke; the question is taken back" in err
    assert "no answer; the question is taken back" in err


def test_a_lost_connection_ends_it_in_a_pipe(monkeypatch, capsys):
    lines = iter(["one", "two"])
    monkeypatch.setattr("builtins.input", lambda prompt="": _next(lines))
    assert main(["chat", "--url", "127.0.0.1:1", "--timeout", "0.2"]) == 4
    assert next(lines) == "two"


async def test_an_answer_in_full(template, talk):
    prompts, out, err = await talk(SpellingVerifier(), ["one", "/stats"])
    assert prompts == ["u:one;"]
    assert TEXT in out
    assert str(len(IDS)) in err
