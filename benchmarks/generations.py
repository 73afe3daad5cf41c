"""Sessions that run at once against a verifier, and what they tell about it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from rootward.clock import SystemClock
from rootward.core.requests import Sampling, Speculation, SpeculationStats, Stopping, VerifierRequest
from rootward.ports import Verifier

LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """So many sessions of so many tokens each, at temperature 1; `name` keeps request ids of different loads apart, and `seed` their texts
    where those follow from it (coupled)."""

    sessions: int
    max_tokens: int
    speculation: Speculation
    name: str
    prompt: tuple[int, ...] = (1, 2, 3)
    seed: int = 0

    def scaled(self, share: float) -> Load:
        return replace(self, max_tokens=max(1, int(share * self.max_tokens)), name=f"{self.name}-warm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """rate: tokens per second and session between its first and its last run. The rest are sums over sessions."""

    rate: float
    rounds: int
    tree_rounds: int
    accepted: int

    @property
    def block_efficiency(self) -> float:
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def with_tree(self) -> float:
        """Share of rounds that had a tree."""
        return self.tree_rounds / self.rounds if self.rounds else 0.0


async def measured(verifier: Verifier, load: Load) -> Outcome:
    """All sessions of a load, started together."""
    async with asyncio.timeout(LONGEST_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_session(verifier, load, number)) for number in range(load.sessions)]
    rates, stats = zip(*(task.result() for task in tasks), strict=True)
    return Outcome(
        sum(rates) / len(rates),
        sum(s.num_spec_steps + s.num_plain_steps for s in stats),
        sum(s.num_spec_steps for s in stats),
        sum(s.num_accepted_draft_tokens for s in stats),
    )


async def _session(verifier: Verifier, load: Load, number: int) -> tuple[float, SpeculationStats]:
    """Tokens per second after the first run, statistics."""
    clock, tokens, stats = SystemClock(), 0, SpeculationStats()
    first = last = 0.0
    request = VerifierRequest(
        f"{load.name}-{number}",
        load.prompt,
        Sampling(1.0),
        Stopping(load.max_tokens, ignore_eos=True),
        load.speculation,
        seed=load.seed + number,
    )
    async for run in verifier.generate(request):
        last = clock.now()
        tokens += len(run.tokens) if first else 0
        first = first or last
        stats = run.finish.stats if run.finish is not None else stats
    return tokens / (last - first) if last > first else 0.0, stats
