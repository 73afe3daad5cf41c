"""A prompt of any length that the verifier takes reaches its drafter."""

from __future__ import annotations

from support.services import assert_at_rest, collect, over_grpc, request
from support.tabular import perturbed

from rootward.core.requests import SpeculationMode
from rootward.engine.tabular import TabularModel
from rootward.wire.channel import FRAME_BYTES

LONG = FRAME_BYTES // 4 + 10_000  # tokens: more than a frame holds


async def test_a_prompt_longer_than_a_frame_gets_a_tree() -> None:
    target = TabularModel(5, seed=1, max_positions=LONG + 2000, max_slots=2)
    draft = perturbed(target, 0.4, seed=2)
    async with over_grpc(target, draft, max_num_batched_tokens=1 << 16, draft_wait_ms=20_000) as system:
        prompt = tuple(i % 5 for i in range(LONG))
        _, last = await collect(
            system.verifier, request("long", prompt, max_tokens=8, temperature=0.0, mode=SpeculationMode.REQUIRED)
        )
        assert last.finish.stats.num_accepted_draft_tokens > 0
        await assert_at_rest(system)
