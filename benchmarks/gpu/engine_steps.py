"""Engine on a device: is it right, and what does a step cost by number of rows?

Right: logits of a ragged batch of trees against the CPU in float32. Cost: median milliseconds of one forward of the target with n rows
of a tree, for one and for several sessions, next to the floor (weight bytes / measured copy bandwidth). No rpc layer needed.

    python -m benchmarks.gpu.engine_steps --device cuda --dtype bfloat16 --model FOLDER --out steps.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.large import weight_bytes_per_step
from benchmarks.gpu.measuring import copy_bandwidth, seconds
from rootward import demo
from rootward.engine.model import HuggingFaceModel
from rootward.ports import COMMITTED, Rows

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 256
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}  # of the logits: what rounding may do


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
    model = HuggingFaceModel.load(path, device=device, dtype=dtype, max_slots=4, max_len=1024, cuda_graphs=cuda_graphs)
    slots = filled(model, 3)
    batch = [tree_rows(s, n, model.info.vocab_size, n) for s, n in zip(slots, (1, 7, 16), strict=True)]
    for _ in range(2):
        model.forward(batch)
        for slot in slots:
            model.release(slot)
    return model.forward(batch).float().cpu()


def milliseconds(model: HuggingFaceModel, slots: list[int], num_rows: int, device: str, repeats: int) -> float:
    """Median time of one forward over a tree of num_rows in every slot."""
    batch = [tree_rows(s, num_rows, model.info.vocab_size, s) for s in slots]

    def release() -> None:
        for slot in slots:
            model.release(slot)

    return 1e3 * statistics.median(seconds(lambda: model.forward(batch), device, repeats, release))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", default=str(demo.paths().target))
    parser.add_argument("--cuda-graphs", action="store_true", help="record steps and replay them")
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="does it run? Few rows on the CPU; times mean nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        vars(args).update(device="cpu", dtype="float32", cuda_graphs=False, sessions=[1], rows=[1, 4], repeats=2)

    reference = logits_of(args.model, "cpu", "float32")
    here = logits_of(args.model, args.device, args.dtype, args.cuda_graphs)
    error = float((reference - here).norm() / reference.norm())
    model = HuggingFaceModel.load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        max_slots=max(args.sessions),
        max_len=1024,
        cuda_graphs=args.cuda_graphs,
    )
    weight_bytes = weight_bytes_per_step(model.network)
    rate = copy_bandwidth(args.device)
    report = {
        "device": args.device,
        "dtype": args.dtype,
        "attention": model.probe_report.attention,
        "cuda_graphs": args.cuda_graphs,
        "parameters": model.info.num_parameters,
        "relative_error": error,
        "bandwidth_GB_s": rate / 1e9,
        "floor_ms": weight_bytes / rate * 1e3,
        "milliseconds": {},
    }
    print(f"attention: {model.probe_report.attention}")
    print(f"relative error of the logits against float32 on the CPU: {error:.1e}")
    print(f"floor of one step: {report['floor_ms']:.3f} ms ({weight_bytes / 1e6:.0f} MB at {rate / 1e9:.0f} GB/s)")
    for num_sessions in args.sessions:
        slots = filled(model, num_sessions)
        line = {n: milliseconds(model, slots, n, args.device, args.repeats) for n in args.rows}
        report["milliseconds"][num_sessions] = line
        print(f"{num_sessions:3d} sessions: " + "  ".join(f"{n} rows {t:.2f}" for n, t in line.items()))
        for slot in slots:
            model.close(slot)
    report["reached"] = error <= TOLERANCE[args.dtype]
    verdict = "reached" if report["reached"] else "MISSED"
    print(f"target: the same logits within {TOLERANCE[args.dtype]:g}: {verdict}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
