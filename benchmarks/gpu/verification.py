"""Verdicts on the device: are they the host's, and what do 32 trees of 64 nodes with 64 atoms cost from rows to verdicts?

Laws are compared with the host's batched form in double precision, stop nodes and bonus tokens with the same code on the CPU. A coin or a
draw that falls into the rounding of float32 may decide otherwise, which one tree in 32 may.

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
from rootward.core.distribution import quantise
from rootward.core.tree import TokenTree
from rootward.core.verification import batched, gather
from rootward.engine import verification

NUM_NODES, NUM_ATOMS = 64, 64
ALGORITHMS = ("token", "traversal")
TOLERANCE, MOST_OTHER = 1e-5, 1 / 32  # error of a law; share of trees that may be decided otherwise


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


def compared(examples: list[Example], algorithm: str, device: str, repeats: int) -> dict[str, Any]:
    """Largest error of a stop probability, shares of equal verdicts, milliseconds."""
    rng, num_trees = np.random.default_rng(1), len(examples)
    forest = batched.Forest.of([e.tree for e in examples])
    ids = batched.gather_ids(forest, np.concatenate([e.atoms for e in examples]))
    weight, target = (np.concatenate([getattr(e, name) for e in examples]) for name in ("weight", "target"))
    exact = batched.forest_law(algorithm, forest, ids, weight, *gather(target, ids))
    inputs = torch.from_numpy(target).float(), *map(torch.from_numpy, (rng.random(len(target)), rng.random(num_trees)))

    def on(where: str) -> tuple[verification.Placed, list[torch.Tensor]]:
        return verification.place(forest, ids, weight, target.shape[1], where), [given.to(where) for given in inputs]

    placed, (probs, coins, u) = on(device)
    p, tail, _ = verification.gathered(probs, placed.ids_TG)
    stop = verification.device_law(algorithm, placed, p, tail).stop_T.double().cpu().numpy()
    here = verification.verify(algorithm, placed, probs, coins, u).to_host(num_trees)
    table, given = on("cpu")
    there = verification.verify(algorithm, table, *given).to_host(num_trees)
    times = seconds(lambda: verification.verify(algorithm, placed, probs, coins, u), device, repeats)
    return {
        "algorithm": algorithm,
        "trees": num_trees,
        "error": float(np.abs(stop[: len(exact.stop)] - exact.stop).max()),
        "same_stop": float(np.mean(here[0] == there[0])),
        "same_bonus": float(np.mean(here[1] == there[1])),
        "ms": 1e3 * statistics.median(times),
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
    rows = [compared(examples, algorithm, args.device, args.repeats) for algorithm in ALGORITHMS]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    report = {"environment": described(), "device": name, "vocab": args.vocab, "nodes": NUM_NODES, "atoms": NUM_ATOMS}
    same = min(min(row["same_stop"], row["same_bonus"]) for row in rows)
    reached = max(row["error"] for row in rows) <= TOLERANCE and same >= 1.0 - MOST_OTHER
    print(f"{name}, V = {args.vocab}\n" + " | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    print(f"target: laws within {TOLERANCE:g}, the same verdicts: {'reached' if reached else 'MISSED'}")
    report |= {"rows": rows, "reached": reached}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
