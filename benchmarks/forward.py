"""`python -m benchmarks.forward --model FOLDER`: milliseconds of one target forward by its rows, beside its linear layers alone.

    python -m benchmarks.forward --model FOLDER --dtypes float32 bfloat16 --threads 2 --out RESULT.json

The linear layers alone are the floor of a small model: with the engine's kernel, whose rows do not depend on one another; the same with
weights in 16 bits, where it has them in 12 (docs/decisions/0033); and with oneDNN's packed weights (`torch.ops.mkldnn`), whose rows may.
All are run in turn; the results are medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.results import cpu_model, save
from rootward.engine.layers import Linear
from rootward.engine.loading import load_model
from rootward.engine.model import HuggingFaceModel
from rootward.ports import Rows

FORWARD, OWN, WHOLE_WEIGHTS, ONEDNN = "forward", "linear layers", "linear layers, 16 bits", "linear layers, oneDNN"


def linears(model: HuggingFaceModel) -> list[Linear]:
    """The linear layers of one forward, each once; ValueError where the engine runs the network's own modules instead."""
    found = [module for module in model.network.modules() if isinstance(module, Linear)]
    if model.llama is None or not found:
        raise ValueError(
            "model: not served by the engine's own layers (Llama family, on a CPU); there is no floor to compare with"
        )
    return list(dict.fromkeys(found))


def alone(layers: Sequence[Linear], rows: int) -> Callable[[], None]:
    inputs = {one.in_features: one.array_of(torch.randn(rows, one.in_features)) for one in layers}
    outputs = {one.out_features: torch.empty(rows, one.out_features).numpy() for one in layers}

    def run() -> None:
        for one in layers:
            one.multiply(inputs[one.in_features], outputs[one.out_features])

    return run


def expanded(layers: Sequence[Linear]) -> list[Linear]:
    """The same layers with their weights in 16 bits."""
    found = [copy(layer) for layer in layers]
    for layer in found:
        layer.expand()
    return found


def by_onednn(layers: Sequence[Linear], rows: int) -> Callable[[], None] | None:
    """None where oneDNN has no kernel for this type on this processor."""
    ops = torch.ops.mkldnn
    try:
        packed = [
            ops._reorder_linear_weight(one.weight_of(torch.arange(one.out_features)).contiguous()) for one in layers
        ]
    except RuntimeError:
        return None
    inputs = {one.in_features: torch.randn(rows, one.in_features, dtype=one.dtype) for one in layers}

    def run() -> None:
        for one, weight in zip(layers, packed, strict=True):
            ops._linear_pointwise(inputs[one.in_features], weight, None, "none", [], "")

    return run


def whole(model: HuggingFaceModel, rows: int, context: int) -> Callable[[], None]:
    """A forward of a chain of so many draft nodes below a text of `context` tokens."""
    slot = model.open()
    model.forward([Rows.chain(slot, 0, list(range(10, 10 + context)))])
    model.commit(slot, context - 1, keep_below=False)

    def run() -> None:
        model.forward([Rows.chain(slot, context, list(range(10, 10 + rows)))])
        model.release(slot)

    return run


@torch.inference_mode()
def measure(
    model: HuggingFaceModel, sizes: Sequence[int], *, context: int, seconds: float
) -> dict[str, dict[int, float]]:
    """Milliseconds by number of rows, of each of the four that this processor has."""
    layers = linears(model)
    with_whole_weights = expanded(layers) if any(layer.is_compact for layer in layers) else []
    found: dict[str, dict[int, float]] = {}
    for rows in sizes:
        candidates = {FORWARD: whole(model, rows, context), OWN: alone(layers, rows), ONEDNN: by_onednn(layers, rows)}
        if with_whole_weights:
            candidates[WHOLE_WEIGHTS] = alone(with_whole_weights, rows)
        runs = {name: run for name, run in candidates.items() if run is not None}
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
            run()
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            for name, run in runs.items():
                start_s = time.perf_counter()
                run()
                taken[name].append(time.perf_counter() - start_s)
        for name, values in taken.items():
            found.setdefault(name, {})[rows] = 1e3 * median(values)
    return found


def table_of(found: dict[str, dict[int, float]], title: str) -> Table:
    sizes = list(found[FORWARD])
    table = Table("ms", *map(str, sizes), title=title, title_justify="left")
    for name, by_rows in found.items():
        table.add_row(name, *(f"{by_rows[rows]:.1f}" for rows in sizes))
    table.add_row(
        "forward, times that of 1 row", *(f"{found[FORWARD][rows] / found[FORWARD][sizes[0]]:.2f}" for rows in sizes)
    )
    table.add_row("share of the linear layers", *(f"{found[OWN][rows] / found[FORWARD][rows]:.0%}" for rows in sizes))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or GGUF file of a model of the Llama family")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=200, help="tokens of the text before the rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of rows")
    parser.add_argument("--out", type=Path, help="JSON result")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    result = {
        "model": Path(given.model).stem,
        "context": given.context,
        "threads": given.threads,
        "ms": {},
    }
    for dtype in given.dtypes:
        model = load_model(given.model, dtype=dtype, max_slots=len(given.rows), max_len=given.context + 256)
        found = measure(model, given.rows, context=given.context, seconds=given.seconds)
        Console(width=120).print(table_of(found, f"{result['model']}, {dtype}, {given.threads} threads, {cpu_model()}"))
        result["ms"][dtype] = found
    if given.out:
        save(given.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
