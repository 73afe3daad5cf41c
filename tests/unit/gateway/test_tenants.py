"""Tenants beside one another: ids of one mean nothing to another, and each pays once for what it gets. Nobody's text stops the rest."""

import asyncio
import threading
from contextlib import AsyncExitStack, aclosing

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import record_of
from unit.gateway.service_for_tests import IDS, TEXT, at_rest, collect, ids_of, serving, settings_of, stored
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.app import build_app
from gateway.models import Models
from gateway.quotas import owed
from gateway.requests import GenerateRequest, Resume, as_chosen, of_tenant
from gateway.router import Upstreams
from gateway.service import GatewayService
from gateway.session_store import FINISHED, INTERRUPTED, RUNNING, MemoryStore, Rate, Record, Run
from rootward.core.requests import FinishReason
from rootward.errors import InvalidRequest, Overloaded, RateLimited, Unavailable

SIZE = 200.0
NEVER_FILLS = Rate(1e-6, SIZE)
PAID = 1 + len(IDS)  # the prompt is one token


def ask(tenant, request_id="one", *, offset=None, tokens=(), **more):
    resume = None if offset is None else Resume(offset, tuple(tokens))
    return GenerateRequest("a", tenant=tenant, request_id=request_id, resume=resume, **{"max_tokens": 50} | more)


ids = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="{}"), min_size=1, max_size=8)


@given(st.text(max_size=8), ids, st.text(max_size=8), ids)
def test_names_of_tenants_never_meet(tenant, name, other, another):
    assert (of_tenant(tenant, name) == of_tenant(other, another)) == ((tenant, name) == (other, another))
    assert as_chosen(of_tenant(tenant, name)) == name


async def test_two_tenants_use_one_id_at_once():
    verifier = SpellingVerifier(delay_s=0.02)
    store = MemoryStore()
    async with serving(verifier, store=store) as service:
        both = await asyncio.gather(*(collect(service, ask(tenant)) for tenant in ("t", "u", "")))
        assert [(one.text, one.request_id) for one in both] == [(TEXT, "one")] * 3
        assert len({r.request_id for r in verifier.requests}) == 3
        await at_rest(service, verifier)
    for name in ("t one", "u one", "one"):
        assert (await record_of(store, name)).output.tokens == IDS


async def test_an_abort_ends_the_requests_of_its_tenant_alone():
    verifier = SpellingVerifier(run=1, delay_s=0.02)
    async with serving(verifier) as service:
        running = {tenant: asyncio.create_task(collect(service, ask(tenant))) for tenant in ("t", "u")}
        while len(verifier.requests) < 2:
            await asyncio.sleep(0.005)
        assert service.abort(["one"], tenant="v") == []
        assert service.abort(["one", "two"], tenant="t") == ["one"]
        assert (await running["t"]).ending.reason is FinishReason.ABORTED
        assert (await running["u"]).text == TEXT
        await at_rest(service, verifier)


async def test_a_strangers_id_is_as_good_as_unknown():
    """Running or finished, the answer to another tenant is that to an id which nobody has used."""
    verifier = SpellingVerifier(run=1, delay_s=0.02)

    async def refusal(service, request_id):
        with pytest.raises(Unavailable) as refused:
            await collect(service, ask("stranger", request_id, offset=3))
        return str(refused.value), refused.value.reason, dict(refused.value.metadata)

    async with serving(verifier) as service:
        async with aclosing(service.generate(ask("t"))) as deltas:
            await anext(deltas)
            assert await refusal(service, "one") == await refusal(service, "never")
            held = [ids_of(d) async for d in deltas]
        assert await refusal(service, "one") == await refusal(service, "never")
        assert len(held) == len(IDS) - 1
        assert (await collect(service, ask("stranger", offset=0))).text == TEXT  # its own, from the beginning
        await at_rest(service, verifier)


# -- what is paid -------------------------------------------------------------------------------------------------------


def level(store, tenant="t"):
    """Tokens in the bucket, which is full at the time that the store keeps."""
    return NEVER_FILLS.size - (store._full_at[tenant] - store._now()) * NEVER_FILLS.tokens_per_s


async def resumed_elsewhere(one, two):
    async with aclosing(one.generate(ask("t"))) as deltas:
        got = ids_of(await anext(deltas))
    await collect(two, ask("t", offset=len(got), tokens=got))


async def taken_over(one, two):
    old = one.generate(ask("t"))
    got = ids_of(await anext(old))
    await collect(two, ask("t", offset=len(got), tokens=got))
    await old.aclose()


async def resumed_at_once(one, two):
    old = one.generate(ask("t"))
    got = ids_of(await anext(old))
    ending = asyncio.create_task(anext(old))
    await collect(one, ask("t", offset=len(got), tokens=got))
    await asyncio.gather(ending, return_exceptions=True)


async def fetched_twice(one, two):
    await collect(one, ask("t"))
    await stored(one)
    for _ in range(2):
        assert (await collect(two, ask("t", offset=0))).text == TEXT


@pytest.mark.parametrize("path", [resumed_elsewhere, taken_over, resumed_at_once, fetched_twice])
async def test_a_request_is_paid_once(path):
    verifier, store = SpellingVerifier(run=1, delay_s=0.01), MemoryStore()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        options = {"store": store, "tenant_rate": NEVER_FILLS}
        one, two = [await enter(serving(verifier, **options)) for _ in range(2)]
        await path(one, two)
        await at_rest(one, verifier)
        await at_rest(two, verifier)
        assert level(store) == pytest.approx(SIZE - PAID, abs=0.01)


async def test_what_never_ran_costs_nothing():
    verifier, store = SpellingVerifier(run=1, delay_s=0.02), MemoryStore()
    async with serving(
        verifier, store=store, tenant_rate=NEVER_FILLS, max_num_seqs=1, max_num_queued_reqs=0
    ) as service:
        first = asyncio.create_task(collect(service, ask("u")))
        while not verifier.running:
            await asyncio.sleep(0.005)
        with pytest.raises(Overloaded):
            await collect(service, ask("t", "two"))
        assert level(store) == pytest.approx(SIZE, abs=0.01)
        await first
        for number in range(int((SIZE - 51) / PAID) + 1):
            await collect(service, ask("t", f"t{number}"))
        with pytest.raises(RateLimited):
            await collect(service, ask("t", "two"))
        await at_rest(service, verifier)


def test_what_is_left_to_pay():
    run = Run(tuple(range(8)), (False,) * 8)
    assert owed(51, 1, Record()) == 51
    assert owed(51, 1, Record({"state": RUNNING}, run)) == 0  # its driver died with it
    assert owed(51, 1, Record({"state": INTERRUPTED}, run)) == 42
    assert Record({"state": FINISHED}).finished


# -- nobody's text stops the rest -----------------------------------------------------------------------------------------


class Slow:
    """A tokenizer that waits, in whatever thread it is asked, until the loop has run."""

    def __init__(self):
        self.inner, self.free = byte_level(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, text, **options):
        assert self.free.wait(20), "the loop stands still"
        return self.inner.encode(text, **options)

    def decode(self, tokens, **options):
        assert self.free.wait(20), "the loop stands still"
        return self.inner.decode(tokens, **options)

    def token_text(self, token):
        assert self.free.wait(20), "the loop stands still"
        return self.inner.token_text(token)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.tokenize("x" * 5000),
        lambda s: s.prompt_ids(GenerateRequest("x" * 5000)),
        lambda s: collect(s, GenerateRequest((1,), max_tokens=2, bad_words=("x" * 25,) * 100)),
        lambda s: collect(s, GenerateRequest((1,), max_tokens=2, prediction="y" * 5000)),
        lambda s: s.detokenize([5] * 1000),
        lambda s: s.token_texts([5] * 1000),
    ],
    ids=["tokenize", "prompt", "bad_words", "prediction", "detokenize", "token_texts"],
)
async def test_long_texts_leave_the_loop_free(call):
    slow = Slow()
    upstreams = Upstreams({"v": SpellingVerifier()}, poll_s=0.02)
    async with GatewayService(slow, upstreams, MemoryStore(), settings=settings_of(), served_model="demo") as service:
        await upstreams.wait_ready(5.0)
        task = asyncio.create_task(call(service))
        await asyncio.sleep(0.05)  # it has begun
        slow.free.set()
        await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("stream", [False, True])
async def test_long_prompts_are_echoed_off_the_loop(stream, monkeypatch):
    monkeypatch.setattr("gateway.tokenizer.INLINE_CHARACTERS", 40)
    slow, prompt = Slow(), list(range(40, 70))
    upstreams = Upstreams({"v": SpellingVerifier()}, poll_s=0.02)
    async with GatewayService(slow, upstreams, MemoryStore(), settings=settings_of(), served_model="demo") as service:
        await upstreams.wait_ready(5.0)
        transport = httpx.ASGITransport(build_app(Models([service])))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "stream": stream}
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.05)  # it has begun
            slow.free.set()
            answer = await asyncio.wait_for(task, 20)
        text = byte_level().decode(prompt)
        assert answer.status_code == 200
        assert stream or answer.json()["choices"][0]["text"].startswith(text + TEXT[:1])


async def test_too_many_bad_words_are_refused_before_they_are_read():
    async with serving() as service:
        with pytest.raises(InvalidRequest, match="bad_words: 257 words are more than 256"):
            await collect(service, GenerateRequest("a", bad_words=("é" * 1000,) * 257))
