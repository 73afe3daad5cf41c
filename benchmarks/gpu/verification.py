"""Verdicts on rows that lie on a device: are they those of the CPU, and what do 32 trees of 64 nodes with 64 atoms cost?

A coin or a draw that falls into the rounding of float32 may decide otherwise, which one tree in 32 may.

    python -m benchmarks.gpu.verification --out verification.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.measuring import seconds
from benchmarks.results import described
from benchmarks.rows import quantise
from rootward.core.living_tree import Snapshot
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key
from rootward.core.tree import TokenTree
from rootward.engine.verify import decide
from verifier_service.runner import Round

NUM_NODES, NUM_ATOMS = 64, 64
RULES = (Rule.TOKEN, Rule.TRAVERSAL)
MOST_OTHER = 1 / 32  # share of trees that may be decided otherwise


@dataclass(frozen=True)
class Example:
    """One tree, drawn without replacement below random parents, with the rows of the nodes that have children."""

    tree: TokenTree
    target: np.ndarray  # float64[N, V]
    draft: np.ndarray  # float64[N, V]
    atoms: np.ndarray  # int64[N, K]
    weight: np.ndarray  # int64[N, K]


def example(rng: np.random.Generator, vocab: int) -> Example:
    logits = 2.0 * rng.gumbel(size=(NUM_NODES, vocab))
    target, q = softmax(logits), softmax(logits + rng.normal(size=logits.shape))
    rows = [quantise(row, NUM_ATOMS) for row in q]
    taken: list[set[int]] = [set() for _ in range(NUM_NODES)]
    token, parent = [0], [-1]
    for node in range(1, NUM_NODES):
        v = int(rng.integers(max(0, node - 16), node))
        left = rows[v].without(taken[v])
        token.append(int(rng.choice(left.ids, p=left.law)))
        parent.append(v)
        taken[v].add(token[-1])
    tree = TokenTree(token, parent, [True] * NUM_NODES)
    given = np.isin(np.arange(NUM_NODES), parent)[:, None]
    draft = given * np.stack([row.dense(vocab) for row in rows])
    atoms = np.where(given, np.stack([row.ids for row in rows]), -1)
    return Example(tree, target, draft, atoms, given * np.stack([row.weight for row in rows]))


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return mass / mass.sum(axis=-1, keepdims=True)


def rounds_of(examples: list[Example], rule: Rule) -> list[Round]:
    """One round per tree, with the draft rows as a drafter declares them."""
    rounds = []
    for i, e in enumerate(examples):
        rows = tuple((e.atoms[n], e.weight[n]) if e.weight[n].any() else None for n in range(len(e.tree)))
        snapshot = Snapshot(e.tree, tuple(range(len(e.tree))), rows)
        rounds.append(Round(i, 1, 100, rule, Sampling(), Key(i), 1, snapshot))
    return rounds


def compared(examples: list[Example], rule: Rule, device: str, repeats: int) -> dict[str, Any]:
    """Shares of verdicts that are those of the CPU, and milliseconds from rows to verdicts."""
    rounds = rounds_of(examples, rule)
    scores = torch.from_numpy(np.log(np.concatenate([e.target for e in examples]))).float()
    there = scores.to(device)
    pairs = list(zip(decide(rounds, there), decide(rounds, scores), strict=True))
    return {
        "rule": rule.value,
        "trees": len(examples),
        "same_stop": float(np.mean([a.stop == b.stop for a, b in pairs])),
        "same_bonus": float(np.mean([a.bonus == b.bonus for a, b in pairs])),
        "ms": 1e3 * statistics.median(seconds(lambda: decide(rounds, there), device, repeats)),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--trees", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="does it run? Two trees on the CPU; times mean nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        vars(args).update(device="cpu", vocab=256, trees=2, repeats=1)
    rng = np.random.default_rng(0)
    examples = [example(rng, args.vocab) for _ in range(args.trees)]
    rows = [compared(examples, rule, args.device, args.repeats) for rule in RULES]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    report = {"environment": described(), "device": name, "vocab": args.vocab, "nodes": NUM_NODES, "atoms": NUM_ATOMS}
    same = min(min(row["same_stop"], row["same_bonus"]) for row in rows)
    reached = same >= 1.0 - MOST_OTHER
    print(f"{name}, V = {args.vocab}\n" + " | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    print(f"target: the same verdicts: {'reached' if reached else 'MISSED'}")
    report |= {"rows": rows, "reached": reached}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
