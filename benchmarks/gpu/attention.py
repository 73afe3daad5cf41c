"""Paged tree attention on a GPU: is it right, and how much of the copy bandwidth does it reach on the prefix?

Right: random ragged trees against the float64 reference, by type and option. Speed: the two launches replayed from a CUDA graph, timed
by device events over storages that do not fit the L2 cache; the floor is the bytes of keys and values of the prefixes divided by the
bandwidth of a large copy measured in the same run. Shape of an 8 B model: H = 32, H_kv = 8, D = 128. torch and triton only.

    python -m benchmarks.gpu.attention --out attention.json
    python -m benchmarks.gpu.attention --sweep        # which tiles and pieces would do better
    TRITON_INTERPRET=1 python -m benchmarks.gpu.attention --device cpu      # correctness only, float32 and float16
    TRITON_INTERPRET=1 python -m benchmarks.gpu.attention --smoke           # does it run?
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rootward.engine.paged import PagedContext
from rootward.engine.triton_attention import Buffers, Plan, make_plan, tree_attention
from tests.support.paged_reference import paged_reference

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
BATCHES, LENGTHS, WIDTHS = (1, 2, 4, 8, 16, 32), (2048, 8192), (1, 16, 32)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WANTED = 0.6  # of the copy bandwidth
COPIES = 4  # storages used in turn, so that one call does not find its keys in the L2 cache
CACHE_BYTES = 1 << 28


@dataclass(frozen=True)
class Shape:
    """B entries of `length` committed tokens, Q rows each."""

    num: int
    length: int
    width: int

    @property
    def prefix_bytes(self) -> int:
        return 2 * self.num * self.length * KV_HEADS * DIM * 2


def ancestors(width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a random tree: ancestors-or-self bool[Q, Q] and depths int32[Q]."""
    sees, depth = torch.eye(width, dtype=torch.bool), torch.zeros(width, dtype=torch.int32)
    for node in range(1, width):
        parent = int(torch.randint(0, node, (), generator=generator))
        sees[node] |= sees[parent]
        depth[node] = depth[parent] + 1
    return sees, depth


def words(sees: torch.Tensor) -> torch.Tensor:
    """bool[..., M] as int32[..., ⌈M / 32⌉]."""
    padded = torch.nn.functional.pad(sees.long(), (0, -sees.shape[-1] % 32)).unflatten(-1, (-1, 32))
    packed = (padded << torch.arange(32)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def make_context(lengths: list[int], width: int, device: str, seed: int = 0) -> tuple[PagedContext, int]:
    """Blocks in random order, a random tree in every entry; and the number of cells."""
    generator = torch.Generator().manual_seed(seed)
    num, per_entry = len(lengths), -(-max(lengths) // BLOCK_SIZE) + 1
    tail = -(-num * width // BLOCK_SIZE)
    table = torch.randperm(num * per_entry, generator=generator).view(num, per_entry)
    scratch = (num * per_entry * BLOCK_SIZE + torch.randperm(num * width, generator=generator)).view(num, width)
    trees = [ancestors(width, generator) for _ in lengths]
    length = torch.tensor(lengths, dtype=torch.int32)
    position = length[:, None] + torch.stack([depth for _, depth in trees])
    sees = words(torch.stack([seen for seen, _ in trees]))
    on = [x.int().to(device) for x in (table, length, scratch, position, sees, position)]
    return PagedContext(BLOCK_SIZE, *on, max_length=max(lengths)), (num * per_entry + tail) * BLOCK_SIZE


def check(device: str, smoke: bool = False) -> list[dict[str, Any]]:
    """Errors against the reference; the storage is random, so that a wrong cell shows."""
    found = []
    types = list(TOLERANCE) if device.startswith("cuda") else [torch.float32, torch.float16]
    options: list[dict[str, Any]] = [{}, {"window": 300}, {"softcap": 2.0}, {"sinks": None}]
    if smoke:
        types, options = types[:1], options[:1]
    shapes = (([700, 0, 333], 9), ([1000, 64], 1)) if device.startswith("cuda") else (([70, 0, 33], 4),)
    for dtype, option, (lengths, width) in itertools.product(types, options, shapes):
        context, cells = make_context(lengths, width, device)
        generator = torch.Generator().manual_seed(1)
        query, keys, values = (
            torch.randn(*shape, generator=generator).to(device, dtype)
            for shape in ((len(lengths), HEADS, width, DIM), (cells, KV_HEADS, DIM), (cells, KV_HEADS, DIM))
        )
        given = {"sinks": torch.linspace(-1, 2, HEADS, device=device)} if "sinks" in option else option
        got = tree_attention(query, keys, values, context, scaling=DIM**-0.5, **given)
        expected = paged_reference(query, keys, values, context, scaling=DIM**-0.5, **given)
        error = float((got.double() - expected).abs().max())
        name = "".join(option) or "plain"
        found.append(
            {"dtype": str(dtype)[6:], "option": name, "rows": width, "error": error, "ok": error <= TOLERANCE[dtype]}
        )
    return found


def microseconds(calls: list[Callable[[], Any]], repeats: int = 20) -> float:
    """Median time of one call: all of them captured in one CUDA graph, replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes per second of a large copy, read plus write."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / (microseconds([lambda: target.copy_(source)]) * 1e-6)


def measure(shape: Shape, plan: Plan | None = None) -> float:
    """Microseconds of one layer's attention; keys and values in turn from storages larger than the cache."""
    copies = max(COPIES, CACHE_BYTES // shape.prefix_bytes + 1)
    buffers, calls = Buffers(), []
    context, cells = make_context([shape.length] * shape.num, shape.width, "cuda")
    query = torch.randn(shape.num, HEADS, shape.width, DIM, dtype=torch.bfloat16, device="cuda")
    for _ in range(copies):
        keys, values = (torch.randn(cells, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))

        def call(keys: torch.Tensor = keys, values: torch.Tensor = values) -> torch.Tensor:
            return tree_attention(query, keys, values, context, scaling=DIM**-0.5, buffers=buffers, plan=plan)

        calls.append(call)
    return microseconds(calls)


def default_plan(shape: Shape) -> Plan:
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    return make_plan(shape.width * HEADS // KV_HEADS, shape.num * KV_HEADS, DIM, 2, shape.length, sms)


def sweep(shape: Shape) -> list[dict[str, Any]]:
    """Other sizes around the default ones, best first."""
    default, found = default_plan(shape), []
    pieces = sorted({max(1, int(default.num_pieces * factor)) for factor in (0.5, 1, 2, 4)})
    for cells, stages, warps, num in itertools.product((32, 64, 128), (2, 3, 4), (4, 8), pieces):
        plan = Plan(default.tile_rows, cells, num, warps, stages)
        try:
            found.append({"us": measure(shape, plan), **asdict(plan)})
        except Exception as wrong:  # more shared memory than there is
            print(f"  {plan}: {type(wrong).__name__}")
    return sorted(found, key=lambda line: line["us"])


def write(report: dict[str, Any], out: Path | None) -> None:
    """After every part: what has been measured outlives what fails after it."""
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--smoke", action="store_true", help="one tree in triton's interpreter on the CPU: does it run?"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.device, args.sweep = "cpu", False

    errors = check(args.device, args.smoke)
    for line in errors:
        print(
            f"{line['dtype']:9s} {line['option']:8s} {line['rows']:3d} rows  error {line['error']:.1e}  {'ok' if line['ok'] else 'WRONG'}"
        )
    report: dict[str, Any] = {"device": args.device, "torch": torch.__version__, "errors": errors}
    write(report, args.out)
    if args.device.startswith("cuda"):
        rate = copy_bandwidth()
        report |= {"name": torch.cuda.get_device_name(), "bandwidth_GB_s": rate / 1e9, "shapes": []}
        print(f"{report['name']}, copy {rate / 1e9:.0f} GB/s; bfloat16, H = {HEADS}, H_kv = {KV_HEADS}, D = {DIM}")
        print("  B  context   Q  pieces     us  floor us  of bandwidth")
        for num, length, width in itertools.product(BATCHES, LENGTHS, WIDTHS):
            shape = Shape(num, length, width)
            time, floor, plan = measure(shape), shape.prefix_bytes / rate * 1e6, default_plan(shape)
            line = {**asdict(shape), **asdict(plan), "us": time, "floor_us": floor, "fraction": floor / time}
            report["shapes"].append(line)
            print(f"{num:3d} {length:8d} {width:3d} {plan.num_pieces:7d} {time:6.1f} {floor:9.1f} {floor / time:13.0%}")
        report["reached"] = reached = sum(line["fraction"] >= WANTED for line in report["shapes"])
        verdict = "reached" if reached == len(report["shapes"]) else "MISSED"
        print(f"target: at least {WANTED:.0%} of the copy bandwidth on the prefix: {verdict} "
              f"({reached} of {len(report['shapes'])} shapes)", flush=True)  # fmt: skip
        write(report, args.out)
    if args.sweep:
        report["sweep"] = {}
        for shape in (Shape(1, 2048, 1), Shape(1, 8192, 32), Shape(32, 8192, 1), Shape(32, 2048, 32)):
            report["sweep"][str(shape)] = best = sweep(shape)[:5]
            print(shape, *best, sep="\n  ", flush=True)
            write(report, args.out)
    if not all(line["ok"] for line in errors):
        raise SystemExit("the kernel differs from the reference")


if __name__ == "__main__":
    main()
