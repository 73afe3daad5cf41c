"""The number of sessions that one card drafts for, computed: `python -m benchmarks.sizing --levels 5.5 --width 3.1`.

From the measured rounds (levels of a tree, rows a session fills while it drafts) and the published figures of a card; no card is asked.

    level     bytes of the draft model ÷ (0.8 · bandwidth): whatever the rows, until arithmetic takes as long
    rows      of a level, until then: level · 0.5 · FLOP/s ÷ (2 · parameters)
    S         levels · level;   R0 = max(S + step, 2 · step), for sessions of one verifier take turns
    sessions  0.7 · rows ÷ (width · S ÷ R0)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

BYTES = 2  # of a weight
BANDWIDTH_USED, FLOPS_USED, ROWS_USED = 0.8, 0.5, 0.7
STEPS_S = (0.04, 0.08)  # of the target
DRAFTS = (0.5e9, 1e9, 3e9)  # parameters


@dataclass(frozen=True, slots=True)
class Card:
    """Figures of the manufacturer: bytes and dense 16-bit operations per second."""

    name: str
    bandwidth: float
    flops: float


CARDS = (Card("L4", 300e9, 121e12), Card("T4", 320e9, 65e12))


@dataclass(frozen=True, slots=True)
class Tree:
    """Levels of a round's growth, rows that it fills in each."""

    levels: float
    width: float


def level_s(card: Card, parameters: float) -> float:
    return BYTES * parameters / (BANDWIDTH_USED * card.bandwidth)


def rows(card: Card, parameters: float) -> float:
    return level_s(card, parameters) * FLOPS_USED * card.flops / (2 * parameters)


def sessions(card: Card, parameters: float, tree: Tree, step_s: float) -> float:
    draft_s = tree.levels * level_s(card, parameters)
    round_s = max(draft_s + step_s, 2 * step_s)
    return ROWS_USED * rows(card, parameters) / (tree.width * draft_s / round_s)


def table(tree: Tree) -> str:
    heads = [f"sessions, step {1e3 * step:.0f} ms" for step in STEPS_S]
    lines = ["| card | draft | level, ms | rows | S, ms | " + " | ".join(heads) + " |", "|---" * (5 + len(heads)) + "|"]
    for card in CARDS:
        for size in DRAFTS:
            level = level_s(card, size)
            cells = [card.name, f"{size / 1e9:g} B", f"{1e3 * level:.1f}", f"{rows(card, size):.0f}"]
            cells += [
                f"{1e3 * tree.levels * level:.0f}",
                *(f"{sessions(card, size, tree, step):.0f}" for step in STEPS_S),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--levels", type=float, required=True, help="draft levels of a round: S / time of a level")
    parser.add_argument("--width", type=float, required=True, help="rows that one session fills: A / S")
    return parser


if __name__ == "__main__":
    given = parser().parse_args()
    print(table(Tree(given.levels, given.width)))
