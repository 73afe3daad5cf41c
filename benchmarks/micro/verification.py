"""What verification costs on the host: 32 trees × 64 nodes × 64 atoms.

    python benchmarks/micro/verification.py [--repeats 15]

Every form is measured once per repeat, one after another, so that a busy machine slows all of them, and each in one thread.
Asserted are processor times, because the wall clock of a shared machine counts the work of others: the batched form within
MOST_MS, and the reference loop LEAST_RATIO times slower (median of the ratios within a repeat). The reference works on whole rows,
so the ratio grows with the vocabulary: it is printed for that of the demo pair as well, and asserted for a quarter of a common one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from rootward.core.distribution import quantise
from rootward.core.rng import Key, coins, coins_batch
from rootward.core.tree import TokenTree
from rootward.core.verification import batched, gather, law, sparse
from rootward.core.verification.verdict import stop_node
from rootward.engine import verification as device

NUM_TREES, NUM_NODES, NUM_ATOMS = 32, 64, 64
VOCABULARIES = (2048, 8192)
LEAST_RATIO, MOST_MS = 20.0, 10.0


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
        return device.place(forest, batched.gather_ids(forest, atoms), weight, target.shape[1], "cpu")

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
    wall, cpu = time.perf_counter(), time.thread_time()
    form()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)


def compare(vocab: int, repeats: int) -> tuple[float, float]:
    """(processor time of the batched form in ms, how often it fits into the reference loop); prints all forms."""
    rng = np.random.default_rng(0)
    measured = forms([example(rng, vocab) for _ in range(NUM_TREES)])
    for form in measured.values():
        form()
    rounds = [[measure(form) for form in measured.values()] for _ in range(repeats)]
    times = dict(zip(measured, np.array(rounds).transpose(1, 2, 0), strict=True))
    print(f"\n{NUM_TREES} trees × {NUM_NODES} nodes × K = {NUM_ATOMS}, V = {vocab}; medians of {repeats}, in ms")
    print(f"{'':34}{'wall':>9}{'least':>9}{'processor':>11}")
    for name, (wall, cpu) in times.items():
        print(f"{name:34}{median(wall):9.2f}{min(wall):9.2f}{median(cpu):11.2f}")
    fast = times["batched numpy, traversal"][1]
    ratios = {name: median(times[name][1] / fast) for name in ("per-tree sparse loop", "reference loop, dense")}
    for name, ratio in ratios.items():
        print(f"{name} / batched: {ratio:.1f}")
    return median(fast), ratios["reference loop, dense"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    fast, ratio = [compare(vocab, repeats) for vocab in VOCABULARIES][-1]
    assert fast <= MOST_MS, f"batched takes {fast:.1f} ms"
    assert ratio >= LEAST_RATIO, f"batched is only {ratio:.1f} times faster than the reference loop"


if __name__ == "__main__":
    main()
