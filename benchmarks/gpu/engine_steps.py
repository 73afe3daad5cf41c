"""Check of the engine on a device: errors of its logits, and the time of a step by its rows.

Errors: logits of a ragged batch of trees, against those of the CPU in float32. Times: median milliseconds of one forward of the target with
n rows of a tree, for one and for several sessions, beside the lower bound (bytes of weights / measured bandwidth of a copy). The services
are not needed.

    python -m benchmarks.gpu.engine_steps --device cuda --dtype bfloat16 --model FOLDER --out steps.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.large import weight_bytes_per_step
from benchmarks.gpu.measuring import copy_bandwidth, head_of, parser, print_report, seconds, settle, spread
from rootward import demo
from rootward.engine.loading import load_model
from rootward.engine.model import HuggingFaceModel
from rootward.ports import COMMITTED, Rows

COLUMNS = ("sessions", "rows", "ms", "floor_ms")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 256
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}  # relative error of the logits that rounding explains


def tree_rows(slot: int, num_rows: int, vocab: int, seed: int) -> Rows:
    """A random tree of so many nodes below the committed end."""
    rng = np.random.default_rng(seed)
    parent = np.array([COMMITTED, *(int(rng.integers(0, i)) for i in range(1, num_rows))], dtype=np.int64)
    return Rows(slot, np.arange(num_rows), parent, rng.integers(0, vocab, num_rows))


def filled(model: HuggingFaceModel, num_slots: int) -> list[int]:
    """Open slots with CONTEXT committed tokens each."""
    slots = []
    for seed in range(num_slots):
        slot = model.open()
        tokens = np.random.default_rng(seed).integers(0, model.info.vocab_size, CONTEXT)
        model.forward([Rows.chain(slot, 0, tokens.tolist())], num_logits=[1])
        model.commit(slot, CONTEXT - 1, keep_below=False)
        slots.append(slot)
    return slots


def logits_of(path: str, device: str, dtype: str, cuda_graphs: bool = False) -> torch.Tensor:
    """Three trees of different sizes in one forward; the third time, when it is recorded if it can be."""
    model = load_model(path, device=device, dtype=dtype, max_slots=4, max_len=1024, cuda_graphs=cuda_graphs)
    slots = filled(model, 3)
    batch = [tree_rows(s, n, model.info.vocab_size, n) for s, n in zip(slots, (1, 7, 16), strict=True)]
    for _ in range(2):
        model.forward(batch)
        for slot in slots:
            model.release(slot)
    return model.forward(batch).float().cpu()


def step_times(model: HuggingFaceModel, slots: list[int], num_rows: int, args: argparse.Namespace) -> list[float]:
    """Seconds of forwards over a tree of num_rows in every slot."""
    batch = [tree_rows(s, num_rows, model.info.vocab_size, s) for s in slots]

    def release() -> None:
        for slot in slots:
            model.release(slot)

    return seconds(lambda: model.forward(batch), args.device, args.repeats, release)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--model", default=str(demo.paths().target))
    options.add_argument("--sessions", type=int, nargs="*", default=[1, 8])
    options.add_argument("--rows", type=int, nargs="*", default=ROWS)
    args = options.parse_args(argv)
    settle(args, no_cuda_graphs=True, sessions=[1], rows=[1, 4])
    reference = logits_of(args.model, "cpu", "float32")
    found = logits_of(args.model, args.device, args.dtype, not args.no_cuda_graphs)
    error = float((reference - found).norm() / reference.norm())
    model = load_model(
        args.model,
        device=args.device,
        dtype=args.dtype,
        max_slots=max(args.sessions),
        max_len=1024,
        cuda_graphs=not args.no_cuda_graphs,
    )
    weight_bytes = weight_bytes_per_step(model.network)
    rate = copy_bandwidth(args.device)
    rows = []
    for num_sessions in args.sessions:
        slots = filled(model, num_sessions)
        for num_rows in args.rows:
            about = {"sessions": num_sessions, "rows": num_rows, "floor_ms": weight_bytes / rate * 1e3}
            rows.append(about | spread(step_times(model, slots, num_rows, args)))
        for slot in slots:
            model.close(slot)
    target = f"the same logits as in float32 on the CPU within {TOLERANCE[args.dtype]:g}"
    report = head_of(args, model, "engine steps", target) | {
        "relative_error": error,
        "bandwidth_GB_s": rate / 1e9,
        "weight_bytes_read": weight_bytes,
        "rows": rows,
        "reached": error <= TOLERANCE[args.dtype],
    }
    print_report(report, COLUMNS, args.out)
    print(f"relative error of the logits: {error:.1e}")
    return report


if __name__ == "__main__":
    main()
