"""What verification costs on the host: 32 trees × 64 nodes × 64 atoms, V = 2048.

    python benchmarks/micro/verification.py [--repeats 30]

Every form is measured once per repeat, one after another, so that a busy machine slows all of them. Printed are medians of
the wall clock and of processor time; asserted is the median of the ratios within a repeat, in processor time (numpy computes in one
thread), because the wall clock of a shared machine counts the work of others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from rootward.core.rng import Key, coins, coins_batch
from rootward.core.rows import quantise
from rootward.core.tree import TokenTree
from rootward.core.verification import batched, gather, law, sparse
from rootward.core.verification.verdict import stop_node
from rootward.engine import verification as device

NUM_TREES, NUM_NODES, NUM_ATOMS, VOCAB = 32, 64, 64, 8192
LEAST_RATIO = 20.0  # reference loop / batched


@dataclass(frozen=True)
class Example:
    """One tree, drawn without replacement below random parents, with the rows of the nodes that have children."""

    tree: TokenTree
    target: np.ndarray  # float64[N, V]
    draft: np.ndarray  # float64[N, V]
    atoms: np.ndarray  # int64[N, K]
    weight: np.ndarray  # int64[N, K]

    def fresh(self) -> TokenTree:
        """The tree without anything remembered about it."""
        return TokenTree(self.tree.token, self.tree.parent, self.tree.sampled)


def example(rng: np.random.Generator) -> Example:
    logits = 2.0 * rng.gumbel(size=(NUM_NODES, VOCAB))
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
    draft = given * np.stack([row.dense(VOCAB) for row in rows])
    atoms = np.where(given, np.stack([row.ids for row in rows]), -1)
    return Example(tree, target, draft, atoms, given * np.stack([row.weight for row in rows]))


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return mass / mass.sum(axis=-1, keepdims=True)


def forms(examples: list[Example]) -> dict[str, Callable[[], object]]:
    """What is measured; each starts from trees, draft rows and gathered target masses."""
    atoms, weight = np.concatenate([e.atoms for e in examples]), np.concatenate([e.weight for e in examples])
    target = np.concatenate([e.target for e in examples])
    at, tail = gather(target, atoms)
    probs, u = torch.from_numpy(target).float(), torch.rand(NUM_TREES, dtype=torch.float64)
    keys = [Key(seed) for seed in range(NUM_TREES)]
    rounds = [(key, 1, 100, range(NUM_NODES)) for key in keys]
    coins_T = torch.from_numpy(coins_batch(rounds))

    def flat(algorithm: str) -> batched.ForestLaw:
        forest = batched.Forest.of([e.fresh() for e in examples])
        return batched.forest_law(algorithm, forest, batched.gather_ids(forest, atoms), weight, at, tail)

    def one_by_one() -> list[sparse.SparseLaw]:
        trees = [e.fresh() for e in examples]
        rows = [slice(NUM_NODES * b, NUM_NODES * (b + 1)) for b in range(NUM_TREES)]
        ids = [sparse.gather_ids(tree, atoms[r]) for tree, r in zip(trees, rows, strict=True)]
        parts = zip(trees, ids, rows, strict=True)
        return [sparse.sparse_law("traversal", tree, G, weight[r], at[r], tail[r]) for tree, G, r in parts]

    def reference() -> list[object]:
        return [law("traversal", e.fresh(), e.target, e.draft) for e in examples]

    def placed() -> device.Placed:
        forest = batched.Forest.of([e.fresh() for e in examples])
        return device.place(forest, batched.gather_ids(forest, atoms), weight, VOCAB, "cpu")

    tables, laws, verdicts = placed(), one_by_one(), flat("traversal")
    p_TG, tail_T, _ = device.gathered(probs, tables.ids_TG)
    return {
        "batched numpy, traversal": lambda: flat("traversal"),
        "batched numpy, token": lambda: flat("token"),
        "per-tree sparse loop": one_by_one,
        "reference loop, dense": reference,
        "coins and stop nodes, batched": lambda: batched.stop_nodes(verdicts, coins_batch(rounds)),
        "coins and stop nodes, loop": lambda: [stop_node(a, coins(*r)) for a, r in zip(laws, rounds, strict=True)],
        "torch on CPU, tables": placed,
        "torch on CPU, law": lambda: device.device_law("traversal", tables, p_TG, tail_T),
        "torch on CPU, rows to verdicts": lambda: device.verify("traversal", tables, probs, coins_T, u),
    }


def measure(form: Callable[[], object]) -> tuple[float, float]:
    """(wall clock, processor time) in ms."""
    wall, cpu = time.perf_counter(), time.process_time()
    form()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    rng = np.random.default_rng(0)
    measured = forms([example(rng) for _ in range(NUM_TREES)])
    for form in measured.values():
        form()
    times = {name: np.array(columns) for name, columns in zip(measured, interleaved(measured, repeats), strict=True)}
    print(f"{NUM_TREES} trees × {NUM_NODES} nodes × K = {NUM_ATOMS}, V = {VOCAB}; medians of {repeats}, in ms")
    print(f"{'':34}{'wall':>9}{'least':>9}{'processor':>11}")
    for name, (wall, cpu) in times.items():
        print(f"{name:34}{median(wall):9.2f}{min(wall):9.2f}{median(cpu):11.2f}")
    fast = times["batched numpy, traversal"][1]
    for name in ("per-tree sparse loop", "reference loop, dense"):
        print(f"{name} / batched: {median(times[name][1] / fast):.1f}")
    ratio = median(times["reference loop, dense"][1] / fast)
    assert ratio >= LEAST_RATIO, f"batched is only {ratio:.1f} times faster than the reference loop"


def interleaved(measured: dict[str, Callable[[], object]], repeats: int) -> np.ndarray:
    """float64[form, 2, repeats]."""
    return np.array([[measure(form) for form in measured.values()] for _ in range(repeats)]).transpose(1, 2, 0)


if __name__ == "__main__":
    main()
