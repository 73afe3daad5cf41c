"""The speculation controller on simulated machines and drafts: goodput as a share of that of the best fixed number of nodes.

    python -m benchmarks.controller_simulation

A world is a cost of rows (cheap, dear, in blocks of six, ...), a draft (good to bad, growing deep or wide) and a time of growth. The speed
of its machine is noisy and jumps. The best fixed number follows from the true expectations, which the controller does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verifier_service.speculation import SIZES, RoundResult, SpeculationController, StepTime

ROUNDS, SEEDS, MOST = 1000, 4, 64
STEP_S = 0.05  # a plain step
COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1 + 0.002 * rows,
    "gentle": lambda rows: 1 + 0.012 * rows,
    "blocks of six": lambda rows: 1 + 0.35 * ((rows - 1) // 6),
    "steep": lambda rows: 0.55 + 0.45 * rows**0.8,
}


@dataclass(frozen=True)
class World:
    """cost: of a step by its rows, in plain steps; first: acceptance of the first node; node_s: of a level; wide: large trees are."""

    cost: str
    first: float
    node_s: float
    wide: bool = False

    @property
    def name(self) -> str:
        return f"{self.cost}, {self.first:g}, {1e3 * self.node_s:g} ms{', wide' if self.wide else ''}"

    def acceptance(self, nodes: int) -> np.ndarray:
        """Of every node of a tree of this size, in draw order."""
        if not self.wide:
            return self.first ** (1 + 0.55 * np.arange(nodes) ** 0.8)
        width = min(4, max(1, nodes // 4))  # chains side by side, the first ones better
        level, place = np.divmod(np.arange(nodes), width)
        share = (1 - self.first) ** place * self.first
        return share * self.first ** (0.7 * level)

    def step_s(self, nodes: int) -> float:
        return STEP_S * COSTS[self.cost](nodes + 1)

    def wait_s(self, nodes: int) -> float:
        levels = nodes / min(4, max(1, nodes // 4)) if self.wide and nodes else nodes
        return self.node_s * (1.5 + 0.8 * levels) if nodes else 0.0

    def tokens(self, nodes: int) -> float:
        return 1.0 + float(self.acceptance(nodes).sum())

    def goodput(self, nodes: int) -> float:
        return self.tokens(nodes) / (self.step_s(nodes) + self.wait_s(nodes))


WORLDS = [
    World(cost, first, node_s, wide)
    for cost in COSTS
    for first in (0.3, 0.6, 0.8, 0.92)
    for node_s, wide in ((0.0005, False), (0.003, True), (0.01, False))
]


def speeds(rng: np.random.Generator, rounds: int) -> np.ndarray:
    """Time of a step of a machine that others use, over the usual one: noise of 8 %, and now and then another speed."""
    jumps = rng.random(rounds) < 0.01
    speed = np.exp(0.25 * rng.standard_normal(rounds))
    last = np.maximum.accumulate(np.where(jumps, np.arange(rounds), -1))
    return np.where(last >= 0, speed[last], 1.0) * np.exp(0.08 * rng.standard_normal(rounds))


def share_of_best(world: World, seed: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """(goodput of the controller over that of the best fixed number, over that of plain decoding) on one machine."""
    rng = np.random.default_rng(seed)
    path = speeds(rng, rounds)
    measured = {n + 1: world.step_s(n) * float(np.exp(0.1 * rng.standard_normal())) for n in SIZES if n <= MOST}
    controller = SpeculationController(StepTime(measured))
    kind = controller.of("simulated")
    tokens = seconds = 0.0
    for speed in path:
        controller.plan({kind: 1}, most=MOST)
        nodes, _ = kind.begin_round(1, MOST)
        accepted = rng.random(nodes) < world.acceptance(nodes)
        step_s, wait_s = speed * world.step_s(nodes), speed * world.wait_s(nodes)
        controller.step_time.add(nodes + 1, step_s, plain=not nodes)
        wait = wait_s / controller.step_time.speed
        kind.add(1, RoundResult(nodes, nodes, tuple((np.flatnonzero(accepted) + 1).tolist()), wait))
        tokens += world.tokens(nodes)
        seconds += step_s + wait_s
    best = max(world.goodput(n) for n in SIZES if n <= MOST)
    usual = rounds / float(path.sum())  # a fixed number takes the mean speed
    return tokens / seconds / (best * usual), tokens / seconds / (world.goodput(0) * usual)


def main() -> int:
    shares = []
    print("| world (cost of rows, first acceptance, growth) | best nodes | share of best | worst seed | x plain |")
    print("|---|---|---|---|---|")
    for world in WORLDS:
        found = np.array([share_of_best(world, seed) for seed in range(SEEDS)])
        best = max((n for n in SIZES if n <= MOST), key=world.goodput)
        share, over_plain = found.mean(axis=0)
        shares.append(share)
        print(f"| {world.name} | {best} | {share:.3f} | {found[:, 0].min():.3f} | {over_plain:.2f} |", flush=True)
    print(
        f"\nmean {np.mean(shares):.3f}, worst world {min(shares):.3f}, {sum(s < 0.95 for s in shares)} of {len(shares)} below 0.95"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
