"""Parts that the GPU checks share: the clock, the bandwidth, engine rounds at a given context, the report."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.large import LARGE, TINY, Network, random_network
from benchmarks.results import described
from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key
from rootward.engine.graphs import CudaCapture, Run
from rootward.engine.model import HuggingFaceModel
from rootward.ports import Rows
from verifier_service.runner import Round, Runner

WARM_UP = 4  # rounds: a bucket is recorded the second time it comes
ATOMS = 32  # of a declared draft law
CHUNK = 512  # rows of a prefill forward


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every check has."""
    found = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    found.add_argument("--device", default="cuda")
    found.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    found.add_argument("--no-cuda-graphs", action="store_true", help="launch every step from Python")
    found.add_argument("--repeats", type=int, default=40)
    found.add_argument("--out", type=Path, help="JSON file")
    found.add_argument("--smoke", action="store_true", help="does it run? A tiny model on the CPU; times mean nothing")
    return found


def settle(args: argparse.Namespace, **small: Any) -> None:
    """Apply the options that --smoke stands for."""
    if args.smoke:
        vars(args).update({"device": "cpu", "dtype": "float32", "repeats": 3, **small})
    torch.set_grad_enabled(False)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str, repeats: int, after: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds of every call but the first ones, until the device has finished it. `after` is not counted."""
    times = []
    for _ in range(repeats + WARM_UP):
        wait(device)
        start_s = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - start_s)
        after()
    return times[WARM_UP:]


def copy_bandwidth(device: str, num_bytes: int = 1 << 30, copies: int = 10) -> float:
    """Bytes per second of a large copy, read plus write; several copies to a reading, so that launches do not count."""
    num_bytes = num_bytes if device.startswith("cuda") else 1 << 24
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source)

    return 2 * num_bytes * copies / statistics.median(seconds(copy, device, 10))


def model_of(
    network: Network, args: argparse.Namespace, *, max_slots: int, max_len: int, **more: Any
) -> HuggingFaceModel:
    """The network in our engine, steps recorded unless that was refused."""
    on_device = network.device.type == "cuda"
    capture = None if args.no_cuda_graphs else CudaCapture(network.device) if on_device else run_again
    how = {"name": "random", "attn": "sdpa" if on_device else "eager"}  # our attention on a CPU cannot be recorded
    return HuggingFaceModel(network, max_slots=max_slots, max_len=max_len, capture=capture, **(how | more))


def run_again(run: Run) -> Run:
    """Stands for a graph on a CPU: what was recorded is run, over the same buffers, into the same tensor."""
    out = run()
    return lambda: out.copy_(run())


def recorded(model: HuggingFaceModel) -> dict[str, int] | None:
    """Steps that were replayed, and others; None where none is recorded."""
    graphs = getattr(model._pass, "graphs", None)
    return None if graphs is None else {"replayed": graphs.num_replayed, "other": graphs.num_other}


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    found: torch.dtype = getattr(torch, args.dtype)
    return found


def random_model(args: argparse.Namespace, *, max_slots: int, max_len: int) -> HuggingFaceModel:
    """The 8 B shape with random weights; a tiny one in a smoke run."""
    shape = TINY if args.smoke else LARGE
    network = random_network(shape, args.device, getattr(torch, args.dtype), max_len)
    return model_of(network, args, max_slots=max_slots, max_len=max_len)


def opened(model: HuggingFaceModel, num_sessions: int, context: int) -> list[int]:
    """Slots with so many committed tokens each; what an earlier one has cached is found again."""
    slots = []
    for seed in range(num_sessions):
        tokens = np.random.default_rng(seed).integers(0, model.info.vocab_size, context).tolist()
        slot = model.open(tokens)
        while (held := model.length(slot)) < context:
            chunk = tokens[held : held + CHUNK]
            model.forward([Rows.chain(slot, 0, chunk)], num_logits=[1])
            model.commit(slot, len(chunk) - 1, keep_below=False)
        slots.append(slot)
    return slots


def drawn(model: HuggingFaceModel, length: int, num_rows: int, seed: int) -> Snapshot | None:
    """A random tree with so many rows, its root among them, every family with a declared law; None: one row is plain decoding."""
    if num_rows == 1:
        return None
    rng, vocab = np.random.default_rng(seed), model.info.vocab_size
    tree = LivingTree(length, 0, vocab_size=vocab)
    nodes = [tree.root_id]
    for _ in range(num_rows - 1):
        parent = int(rng.choice(nodes))
        record = tree.at(parent)
        if record.row is None:
            record.row = np.sort(rng.choice(vocab, ATOMS, replace=False)), np.ones(ATOMS, np.int64)
        taken = [tree.at(child).token for child in record.children]
        token = int(rng.choice(np.setdiff1d(record.row[0], taken)))
        nodes.append(tree.draw(parent, token, sampled=True))
    return tree.snapshot(num_rows - 1)


def round_times(
    model: HuggingFaceModel, args: argparse.Namespace, *, sessions: int, context: int, rows: int, temperature: float
) -> list[float]:
    """Seconds of engine rounds, forward to commit, that end below `context` tokens; trees of so many rows in every session."""
    runner, rule = Runner(model), Rule.TRAVERSAL if temperature and rows > 1 else Rule.MATCH
    start = context - 2 * (args.repeats + WARM_UP) - rows  # a round here commits one token, hardly ever two
    slots, number = opened(model, sessions, start), iter(range(1 << 30))
    upcoming: list[Round] = []

    def prepare() -> None:
        seed = next(number)
        upcoming[:] = [
            Round(slot, 1, length + 1, rule, Sampling(temperature), Key(slot), 0, drawn(model, length + 1, rows, seed))
            for slot in slots
            for length in (model.length(slot),)
        ]

    prepare()
    found = seconds(lambda: runner.step([], upcoming), args.device, args.repeats, prepare)
    for slot in slots:
        model.close(slot)
    return found


def forward_times(
    model: HuggingFaceModel, args: argparse.Namespace, *, sessions: int, context: int, rows: int
) -> list[float]:
    """Seconds of the forward alone, of a chain of so many rows in every session."""
    slots = opened(model, sessions, context - rows)
    batch = [Rows.chain(slot, 0, [1] * rows) for slot in slots]

    def release() -> None:
        for slot in slots:
            model.release(slot)

    found = seconds(lambda: model.forward(batch), args.device, args.repeats, release)
    for slot in slots:
        model.close(slot)
    return found


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles around it, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"ms": middle * 1e3, "ms_low": low * 1e3, "ms_high": high * 1e3}


def head_of(args: argparse.Namespace, model: HuggingFaceModel, check: str, target: str) -> dict[str, Any]:
    """The head of a report."""
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    return {
        "check": check,
        "target": target,
        "environment": described(),
        "device": device,
        "dtype": args.dtype,
        "smoke": args.smoke,
        "attention": model.probe_report.attention,
        "cuda_graphs": not args.no_cuda_graphs,
        "parameters": model.info.num_parameters,
    }


def print_report(report: dict[str, Any], columns: Iterable[str], out: Path | None) -> None:
    """Print the rows of a report as a table, then its verdict; write all of it to a file."""
    names = list(columns)
    print(f"{report['check']}: {report['device']}, {report['dtype']}, {report['parameters'] / 1e6:.1f} M parameters, "
          f"attention {report['attention']}, CUDA graphs {'on' if report['cuda_graphs'] else 'off'}")  # fmt: skip
    print(" | ".join(names))
    for row in report["rows"]:
        print(" | ".join(f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names))
    verdict = "smoke run, no verdict" if report["smoke"] else "reached" if report["reached"] else "MISSED"
    print(f"target: {report['target']}: {verdict}")
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
