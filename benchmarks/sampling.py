"""Milliseconds of making distributions of logits on a CPU, by rows and sampling parameters: with the engine's compiled top-p, and with the
sorted candidates that other devices use; and of the verdicts of as many rounds without a tree, distributions included.

    python -m benchmarks.sampling --model FOLDER --out RESULT.json

The logits are those of a model after a text, so that a nucleus has the size that it has in use.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from benchmarks.results import described, markdown_table, save
from rootward import demo
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key
from rootward.core.tree import root_only
from rootward.engine import sampling
from rootward.engine.loading import load_model
from rootward.engine.tokenizers import load_tokenizer
from rootward.engine.verify import Proposal, decide
from rootward.ports import Rows

PARAMETERS = {
    "temperature": Sampling(1.0),
    "top_p 0.9": Sampling(1.0, top_p=0.9),
    "top_p 0.95": Sampling(1.0, top_p=0.95),
    "top_k 50, top_p 0.9": Sampling(1.0, top_k=50, top_p=0.9),
}


def logits_of(path: str, rows: int) -> torch.Tensor:
    """float32[rows, V]: after each of the last tokens of the demo's chats."""
    model, tokenizer = load_model(path, dtype="bfloat16"), load_tokenizer(path)
    tokens = [token for text in demo.chats() for token in tokenizer.encode(text)][-2 * rows :]
    with torch.inference_mode():
        return model.forward([Rows.chain(model.open(), 0, tokens)], num_logits=[rows]).float().contiguous()


def median_ms(run: Callable[[], object], turns: int) -> float:
    """Median over the turns, after three that warm up."""
    seconds = []
    for _ in range(turns + 3):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return 1e3 * median(seconds[3:])


def by_candidates(logits_TV: torch.Tensor, parameters: list[Sampling]) -> torch.Tensor:
    """As on another device."""
    on_host, sampling.host_can_read = sampling.host_can_read, lambda _: False
    try:
        return sampling.distributions(logits_TV, parameters)
    finally:
        sampling.host_can_read = on_host


def without_tree(parameters: Sampling, number: int) -> Proposal:
    """The round of a session."""
    return SimpleNamespace(
        tree=root_only(),
        rows=(None,),
        rule=Rule.TRAVERSAL,
        sampling=parameters,
        key=Key(number),
        epoch=1,
        length=100,
        shared=False,
        copies=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sampling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON result")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    logits_TV = logits_of(given.model, max(given.rows))
    found = []
    for name, parameters in PARAMETERS.items():
        for rows in given.rows:
            arguments = logits_TV[:rows], [parameters] * rows
            own_ms = median_ms(lambda arguments=arguments: sampling.distributions(*arguments), given.turns)  # type: ignore[misc]
            other_ms = median_ms(lambda arguments=arguments: by_candidates(*arguments), given.turns)  # type: ignore[misc]
            rounds = [without_tree(parameters, number) for number in range(rows)]
            verdict_ms = median_ms(lambda arguments=(rounds, logits_TV[:rows]): decide(*arguments), given.turns)  # type: ignore[misc]
            times = {"ms": own_ms, "ms_by_candidates": other_ms, "verdicts_ms": verdict_ms}
            found.append({"parameters": name, "rows": rows, **times})
    print(described())
    cells = [
        [str(r["parameters"]), str(r["rows"]), *(f"{r[key]:.2f}" for key in ("ms", "ms_by_candidates", "verdicts_ms"))]
        for r in found
    ]
    print(markdown_table(["parameters", "rows", "ms", "ms, sorted candidates", "verdicts without a tree, ms"], cells))
    if given.out is not None:
        save(given.out, {"vocabulary": logits_TV.shape[1], "threads": given.threads, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
