"""Paired repetitions: every system does the same job in turn, and what is compared is the ratio within a repetition.

A machine that slows down or is shared slows down all systems of a repetition, so ratios are steadier than times.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from benchmarks.intervals import Interval, interval


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts (token ids) that start together. Every one is continued by exactly `max_tokens` tokens; end of text does not end it."""

    prompts: tuple[tuple[int, ...], ...]
    temperature: float
    max_tokens: int
    seed: int


@dataclass(slots=True)
class Run:
    """What one system made of a job.

    seconds   from the first prompt handed in to the last token handed out, prefill included
    passes    forwards of the target that made tokens, per session and summed (a batched forward counts for each of its sessions)
    drafted, accepted   draft tokens verified, and accepted
    speculated   passes that verified at least one draft token
    first_s   until every session had its first tokens, first of them in all: what the prompts cost. 0: not known
    """

    tokens: list[list[int]]
    seconds: float
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    speculated: int = 0
    first_s: float = 0.0
    first: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def later_per_s(self) -> float:
        """Tokens per second after the first ones, the prompts behind them."""
        return (self.num_tokens - self.first) / (self.seconds - self.first_s)

    def numbers(self) -> dict[str, Any]:
        """Everything but the tokens, for a file."""
        names = ("passes", "drafted", "accepted", "speculated", "first_s", "first")
        counts = {name: getattr(self, name) for name in names}
        return {"seconds": self.seconds, "num_tokens": self.num_tokens, **counts}


class System(Protocol):
    """Something that generates."""

    name: str
    most_sessions: int | None  # None: any number
    chosen: str  # the setting it was tuned to; "" where there is nothing to tune

    async def run(self, job: Job) -> Run: ...


@dataclass(slots=True)
class Paired:
    """Runs of several systems on the same jobs: `runs[name][i]` is repetition i."""

    runs: dict[str, list[Run]] = field(default_factory=dict)

    def tokens_per_s(self, name: str) -> float:
        """Median over the repetitions."""
        return median(run.tokens_per_s for run in self.runs[name])

    def ratio(self, name: str, to: str) -> Interval:
        """Of tokens per second, repetition by repetition."""
        pairs = zip(self.runs[name], self.runs[to], strict=True)
        return interval([run.tokens_per_s / other.tokens_per_s for run, other in pairs])

    def later_ratio(self, name: str, to: str) -> Interval | None:
        """The same of what comes after the first tokens; None where that is not known."""
        pairs = list(zip(self.runs[name], self.runs[to], strict=True))
        if not all(run.first for pair in pairs for run in pair):
            return None
        return interval([run.later_per_s / other.later_per_s for run, other in pairs])

    def tokens_per_pass(self, name: str) -> float:
        """Block efficiency: tokens per target forward, over all repetitions."""
        return sum(r.num_tokens for r in self.runs[name]) / max(1, sum(r.passes for r in self.runs[name]))

    def acceptance(self, name: str) -> float | None:
        """Share of verified draft tokens that were accepted; None without any."""
        drafted = sum(r.drafted for r in self.runs[name])
        return sum(r.accepted for r in self.runs[name]) / drafted if drafted else None

    def same_text(self, name: str, to: str) -> float:
        """Share of continuations that are equal token by token. For greedy decoding; rounding may part near ties."""
        pairs = zip(self.runs[name], self.runs[to], strict=True)
        equal = [a == b for run, other in pairs for a, b in zip(run.tokens, other.tokens, strict=True)]
        return sum(equal) / len(equal)


def orders(names: Sequence[str], repetitions: int, seed: int) -> Iterator[list[str]]:
    """An order of the systems for every repetition: each is first, second, … equally often, up to a rest."""
    first = list(names)
    random.Random(seed).shuffle(first)
    for i in range(repetitions):
        turn = i % len(first)
        yield first[turn:] + first[:turn]


async def measure(
    systems: Sequence[System],
    jobs: Sequence[Job],
    seed: int,
    rest: Callable[[], Awaitable[None]],
    done: Callable[[str, Run], None] = lambda name, run: None,
) -> Paired:
    """All systems on all jobs, interleaved. `rest` is awaited before each run, so that what the last one left over can end."""
    by_name = {system.name: system for system in systems}
    found = Paired({system.name: [] for system in systems})
    for job, order in zip(jobs, orders(list(by_name), len(jobs), seed), strict=True):
        for name in order:
            await rest()
            run = await by_name[name].run(job)
            short = [len(tokens) for tokens in run.tokens if len(tokens) != job.max_tokens]
            if short or len(run.tokens) != len(job.prompts):
                raise ValueError(
                    f"{name}: {len(run.tokens)} continuations, lengths {short} instead of {job.max_tokens}"
                )
            found.runs[name].append(run)
            done(name, run)
    return found
