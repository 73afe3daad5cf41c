"""Hints on who holds a prompt, in a real Redis, beside a real verifier: true until it evicts the prompt or restarts, then ignored."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.redis import running_redis
from support.services import collect, request, verifier_of

from gateway.ledger import Ledger
from gateway.redis_store import open_store
from gateway.router import Upstreams
from rootward.core.requests import SpeculationMode, VerifierRequest
from rootward.engine.tabular import TabularModel


def asked(name: str, token: int) -> VerifierRequest:
    return request(name, (token,) * 96, max_tokens=2, mode=SpeculationMode.DISABLED)


async def test_a_hint_counts_as_long_as_its_prefix_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.HINT_S", 10)  # on a busy machine Redis may need longer than gateways wait
    with running_redis() as url:
        target = TabularModel(5, seed=1, max_slots=2, max_positions=128, tree_room=16, kv_cache_tokens=320)
        store = open_store(url)
        now = asyncio.get_running_loop().time
        async with verifier_of(target, {}) as verifier:
            upstreams = Upstreams({"v": verifier})
            (upstream,) = upstreams
            one, two = (Ledger(store, now=now, model=lambda: "m", is_held=upstreams.is_held) for _ in range(2))
            blind = Ledger(store, now=now, model=lambda: "m")

            async def computed(wanted: VerifierRequest) -> None:
                await upstreams.has_died(upstream, 0)
                one.computed(one.keys(wanted), (), upstream.holder)
                await one.flush()
                await collect(verifier, wanted)
                while target.num_free_slots < 2:  # until its blocks are idle: the next hint must be younger
                    await asyncio.sleep(0.001)
                await upstreams.has_died(upstream, 0)

            async def in_redis(wanted: VerifierRequest) -> dict[str, int]:
                return await blind.held(blind.keys(wanted))

            first = asked("a", 1)
            await computed(first)
            assert await two.held(two.keys(first)) == {"v": 96}
            assert await two.held(two.keys(replace(first, cache_salt="of another"))) == {}
            for token in (2, 3, 4):
                await computed(asked(f"b{token}", token))
            assert await in_redis(first) == {"v": 96}  # until it expires
            assert await two.held(two.keys(first)) == {}
            await computed(asked("again", 1))
            assert await two.held(two.keys(first)) == {"v": 96}

            last = asked("b4", 4)
            assert await two.held(two.keys(last)) == {"v": 96}
            verifier.incarnation += 1  # as after a restart
            await upstreams.has_died(upstream, 0)
            assert await two.held(two.keys(last)) == {}
        await store.close()
