"""One drafter for the sessions of several verifiers: one draft forward per level for all of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from support.services import collect, drafter_of, request, until, verifier_of

from drafter_service.servicer import DrafterServicer
from rootward.core.requests import DraftMode, Rule
from rootward.engine.tabular import TabularModel
from rootward.wire.channel import DRAFTING
from rootward.wire.clients import RemoteDrafter
from rootward.wire.server import RpcServer

SESSIONS = 16  # of each verifier
WISHES = (
    {},
    {"rule": Rule.TOKEN, "law": DraftMode.GREEDY},
    {"rule": Rule.MATCH, "law": DraftMode.COUPLED},
    {"temperature": 0.0},
)


class Watched(TabularModel):
    """Notes which slots every forward held."""

    def watch(self) -> list[set[int]]:
        self.seen: list[set[int]] = []
        return self.seen

    def forward(self, batch, **how):
        self.seen.append({rows.slot for rows in batch})
        return super().forward(batch, **how)


async def test_one_forward_per_level_for_all_sessions_of_two_verifiers() -> None:
    draft = Watched(6, seed=4, max_slots=2 * SESSIONS)
    forwards = draft.watch()
    drafter = drafter_of(draft)
    level, per_level, most, left_out = drafter.grower.level, [], 0, set()

    def counted():
        nonlocal most
        before, trees = len(forwards), list(drafter.grower.trees.values())
        urgent = [g for g in trees if g.wants_level and not g.ahead]  # growth for later rounds gives way
        wanting = {
            g.kv_slot
            for g in urgent or trees
            if g.wants_tree and not g.exhausted and (g.pending or g.growth.own.frontier(1))
        }
        frames = level()
        per_level.append(len(forwards) - before)
        left_out.update(wanting - set().union(*forwards[before:]))
        most = max(most, len(drafter.grower.trees))
        return frames

    drafter.grower.level = counted
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(drafter)
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.1))
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        verifiers = []
        for name in ("a", "b"):
            target = TabularModel(6, seed=1, max_slots=SESSIONS)
            remote = await stack.enter_async_context(RemoteDrafter(server.address))
            shape = {"num_ahead_tokens": 16, "draft_wait_ms": 5000}
            verifiers.append(await stack.enter_async_context(verifier_of(target, {name: remote}, **shape)))
        for verifier in verifiers:
            await until(lambda v=verifier: v.pool.up)
        jobs = [
            collect(verifier, request(f"r{i}", (1 + i % 4, 2), max_tokens=40, seed=i, **WISHES[i % 4]))
            for verifier in verifiers
            for i in range(SESSIONS)
        ]
        results = await asyncio.gather(*jobs)
    assert all(len(tokens) == 40 for tokens, _ in results)
    assert most == 2 * SESSIONS  # every session of both had its tree here at one time
    assert max(per_level) == 1
    assert not left_out  # whoever wants a row is in it, whosever it is
    sessions_per_forward = [len(slots) for slots in forwards]
    assert max(sessions_per_forward) > SESSIONS  # of both verifiers in one
    assert sum(sessions_per_forward) > 3 * len(forwards)
    draft.check_idle()
