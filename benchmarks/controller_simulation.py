"""The speculation controller on simulated machines and drafts: goodput as a share of that of the best fixed number of nodes.

    python -m benchmarks.controller_simulation

A scenario has a step time by rows (flat, steep, in blocks of six, ...), a draft (acceptance good to bad, trees deep or wide) and a time per
level of growth. The speed of its machine is noisy and jumps. The best fixed number of nodes, of all numbers up to the largest, follows from
the true expectations, which the controller does not know.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rootward.core.growth import BestFirst
from verifier_service.speculation import RoundResult, SpeculationController
from verifier_service.step_time import SIZES, StepTime

ROUNDS = 1000
SEEDS = 4
MAX_NODES = 64
PLAIN_STEP_S = 0.05
WIDE = BestFirst(draws_per_level=4, least_levels=4)  # how a drafter grows trees
RELATIVE_STEP_TIMES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1 + 0.002 * rows,
    "gentle": lambda rows: 1 + 0.012 * rows,
    "blocks of six": lambda rows: 1 + 0.35 * ((rows - 1) // 6),
    "blocks of eight": lambda rows: 1 + 0.35 * ((rows - 1) // 8),
    "steep": lambda rows: 0.55 + 0.45 * rows**0.8,
}


@dataclass(frozen=True)
class Scenario:
    """step_time: key of RELATIVE_STEP_TIMES; first: acceptance of the first node; level_s: time to grow a level."""

    step_time: str
    first: float
    level_s: float
    wide: bool = False  # whether large trees grow wide

    @property
    def name(self) -> str:
        return f"{self.step_time}, {self.first:g}, {1e3 * self.level_s:g} ms{', wide' if self.wide else ''}"

    def acceptance(self, nodes: int) -> np.ndarray:
        """float64[nodes]: probability that each node of a tree of this size is accepted, in draw order."""
        if not self.wide:
            return self.first ** (1 + 0.55 * np.arange(nodes) ** 0.8)
        width = WIDE.draws(nodes)  # chains side by side, the first ones better
        level, place = np.divmod(np.arange(nodes), width)
        share = (1 - self.first) ** place * self.first
        return share * self.first ** (0.7 * level)

    def step_s(self, nodes: int) -> float:
        return PLAIN_STEP_S * RELATIVE_STEP_TIMES[self.step_time](nodes + 1)

    def wait_s(self, nodes: int) -> float:
        levels = math.ceil(nodes / WIDE.draws(nodes)) if self.wide else nodes
        return self.level_s * (1.5 + 0.8 * levels) if nodes else 0.0

    def tokens(self, nodes: int) -> float:
        return 1.0 + float(self.acceptance(nodes).sum())

    def goodput(self, nodes: int) -> float:
        return self.tokens(nodes) / (self.step_s(nodes) + self.wait_s(nodes))


SCENARIOS = [
    Scenario(step_time, first, level_s, wide)
    for step_time in RELATIVE_STEP_TIMES
    for first in (0.3, 0.6, 0.8, 0.92)
    for level_s, wide in ((0.0005, False), (0.003, True), (0.01, False))
]


def relative_times(rng: np.random.Generator, rounds: int) -> np.ndarray:
    """float64[rounds]: step time relative to an idle machine: 8 % noise, and a new level in 1 % of the rounds."""
    jumps = rng.random(rounds) < 0.01
    speed = np.exp(0.25 * rng.standard_normal(rounds))
    last = np.maximum.accumulate(np.where(jumps, np.arange(rounds), -1))
    return np.where(last >= 0, speed[last], 1.0) * np.exp(0.08 * rng.standard_normal(rounds))


def share_of_best(scenario: Scenario, seed: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """Goodput of the controller divided by that of (the best fixed number of nodes, plain decoding)."""
    rng = np.random.default_rng(seed)
    times = relative_times(rng, rounds)
    measured = {n + 1: scenario.step_s(n) * float(np.exp(0.1 * rng.standard_normal())) for n in SIZES if n <= MAX_NODES}
    controller = SpeculationController(StepTime(measured))
    kind = controller.of("simulated")
    tokens = seconds = 0.0
    for relative in times:
        controller.plan({kind: 1}, most=MAX_NODES)
        nodes, _ = kind.begin_round(1, MAX_NODES)
        accepted = rng.random(nodes) < scenario.acceptance(nodes)
        step_s, wait_s = relative * scenario.step_s(nodes), relative * scenario.wait_s(nodes)
        controller.step_time.add(nodes + 1, step_s, drafted=nodes > 0)
        wait = wait_s / controller.step_time.speed
        kind.add(1, RoundResult(nodes, nodes, tuple((np.flatnonzero(accepted) + 1).tolist()), wait))
        tokens += scenario.tokens(nodes)
        seconds += step_s + wait_s
    best = max(scenario.goodput(n) for n in range(MAX_NODES + 1))
    usual = rounds / float(times.sum())  # a fixed number of nodes runs at the mean speed
    return tokens / seconds / (best * usual), tokens / seconds / (scenario.goodput(0) * usual)


def main() -> int:
    shares = []
    print(
        "| scenario (step time by rows, first acceptance, level) | best nodes | share of best | worst seed | x plain |"
    )
    print("|---|---|---|---|---|")
    for scenario in SCENARIOS:
        found = np.array([share_of_best(scenario, seed) for seed in range(SEEDS)])
        best = max(range(MAX_NODES + 1), key=scenario.goodput)
        share, over_plain = found.mean(axis=0)
        shares.append(share)
        print(f"| {scenario.name} | {best} | {share:.3f} | {found[:, 0].min():.3f} | {over_plain:.2f} |", flush=True)
    print(
        f"\nmean {np.mean(shares):.3f}, worst scenario {min(shares):.3f}, {sum(s < 0.95 for s in shares)} of {len(shares)} below 0.95"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
