"""A level of growth against the floor: what the draft's weights alone would cost, with levels recorded and launched from Python.

A level is what a drafter runs: rows of all trees, one forward, atoms, one copy to the host, children drawn there. The draft has the shape
of a 1 B Llama and random weights. Floor = bytes of weights that a forward reads / bandwidth of a large copy in the same run. Rounds commit
a token that was not drafted, so every tree begins anew: one level for the root, then the others below it.

    python -m benchmarks.gpu.growth --out growth.json
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.large import DRAFT, TINY, random_network, weight_bytes_per_step
from benchmarks.gpu.measuring import (
    ATOMS,
    copy_bandwidth,
    dtype_of,
    head_of,
    model_of,
    parser,
    print_report,
    recorded,
    settle,
    spread,
    wait,
)
from rootward.core.frames import Commit, Open, extend_hash
from rootward.core.requests import DraftMode, Sampling
from rootward.engine.grower import Grower
from rootward.engine.model import HuggingFaceModel

WANTED = 0.5
TARGET = "one session: floor / time of a recorded level at least 0.5 under every law"
NODES, WARM_UP = 16, 12  # rounds until every bucket has been seen twice
COLUMNS = ("law", "sessions", "context", "recorded", "levels", "rows", "ms", "floor_ms", "fraction")


def opened(model: HuggingFaceModel, law: DraftMode, sessions: int, context: int) -> Grower[int]:
    """Trees below prompts of so many tokens."""
    drafter: Grower[int] = Grower(model, incarnation=1)
    for slot in range(sessions):
        prefix = tuple(np.random.default_rng(slot).integers(0, model.info.vocab_size, context).tolist())
        message = Open(slot, 1, prefix, Sampling(), law, slot, 0, ATOMS, NODES, 8, 4)
        refused = drafter.open(slot, message)
        if refused is not None:
            raise RuntimeError(refused.reason)
    return drafter


def rounds(drafter: Grower[int], device: str, repeats: int) -> tuple[list[float], list[int]]:
    """Seconds and rows of every level of so many rounds, those of the prompts and of warming up left out."""
    times, rows, forward = [], [], drafter.model.forward

    def counted(batch: Any, **how: Any) -> Any:
        rows.append(sum(len(entry.node) for entry in batch))
        return forward(batch, **how)

    drafter.model.forward = counted  # type: ignore[method-assign]
    for number in range(WARM_UP + repeats):
        while not drafter.idle:
            wait(device)
            start_s, before = time.perf_counter(), len(rows)
            drafter.level()
            wait(device)
            if number >= WARM_UP and len(rows) > before:
                times.append(time.perf_counter() - start_s)
        if number < WARM_UP:
            rows.clear()
        for slot, growing in drafter.trees.items():
            tree = growing.tree
            drawn = {node.token for node in tree.nodes.values()}
            token = next(t for t in itertools.count() if t not in drawn)
            drafter.commit(slot, Commit(slot, tree.length, (token,), extend_hash(tree.hash, token)))
    drafter.model.forward = forward  # type: ignore[method-assign]
    for slot in list(drafter.trees):
        drafter.close(slot)
    return times, rows[: len(times)]


def measured(args: argparse.Namespace, model: HuggingFaceModel, floor_ms: float) -> list[dict[str, Any]]:
    found = []
    for law, sessions in itertools.product((DraftMode.GREEDY, DraftMode.TOP_K, DraftMode.COUPLED), args.sessions):
        times, rows = rounds(opened(model, law, sessions, args.context), args.device, args.repeats)
        took = spread(times)
        at = {"law": law.value, "sessions": sessions, "context": args.context, "recorded": recorded(model) is not None}
        levels = {"levels": len(times), "rows": float(np.mean(rows))}
        found.append(at | levels | took | {"floor_ms": floor_ms, "fraction": floor_ms / took["ms"]})
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--context", type=int, default=512)
    args = options.parse_args(argv)
    settle(args, sessions=[1, 2], context=24)
    longest = args.context + 2 * (args.repeats + WARM_UP)
    network = random_network(TINY if args.smoke else DRAFT, args.device, dtype_of(args), 2 * longest)
    rate, weights = copy_bandwidth(args.device), weight_bytes_per_step(network)
    launched = argparse.Namespace(**{**vars(args), "no_cuda_graphs": True})
    models = [
        model_of(network, way, name="draft", max_slots=max(args.sessions), max_len=2 * longest)
        for way in ([launched] if args.no_cuda_graphs else [launched, args])
    ]
    rows = [row for model in models for row in measured(args, model, weights / rate * 1e3)]
    judged = [row["fraction"] for row in rows if row["sessions"] == 1 and row["recorded"]]
    report = head_of(args, models[-1], "growth", TARGET) | {
        "bandwidth_GB_s": rate / 1e9,
        "weight_bytes_read": weights,
        "steps": recorded(models[-1]),
        "rows": rows,
        "reached": bool(judged) and min(judged) >= WANTED,
    }
    print_report(report, COLUMNS, args.out)
    return report


if __name__ == "__main__":
    main()
