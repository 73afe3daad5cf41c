"""What a second OpenMP team in the process does to a step: the same model on one thread, before and after another thread has computed.

    python -m benchmarks.micro.thread_teams --model FOLDER [--threads 2] [--repeats 25]

`rootward/engine/threads.py` says why. FOLDER: a model whose steps take several threads, as
`benchmarks.suites.serving --inflate 300M --work` leaves one. Medians, milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch

from rootward.engine.loading import load_model
from rootward.ports import Rows
from rootward.settings import ask_for_huge_pages

ROWS, CONTEXT, SIDE = (1, 6), 60, 3000


def loaded(folder: str) -> tuple[Any, int]:
    model = load_model(folder, max_slots=1, max_len=512)
    slot = model.open()
    model.forward([Rows.chain(slot, 0, list(range(CONTEXT)))])
    model.commit(slot, CONTEXT - 1, keep_below=False)
    return model, slot


def step_ms(model: Any, slot: int, rows: int) -> float:
    start_s = time.perf_counter()
    model.forward([Rows.chain(slot, 0, [5] * rows)])
    seconds = time.perf_counter() - start_s
    model.release(slot)
    return 1e3 * seconds


def compute() -> None:
    """Enough for several threads."""
    matrix = torch.ones(SIDE, SIDE)
    (matrix @ matrix).sum()


def main() -> None:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--model", required=True)
    about.add_argument("--threads", type=int, default=2)
    about.add_argument("--repeats", type=int, default=25)
    given = about.parse_args()
    ask_for_huge_pages()
    torch.set_num_threads(given.threads)
    with ThreadPoolExecutor(1) as own, ThreadPoolExecutor(1) as other:
        model, slot = own.submit(loaded, given.model).result()

        def show(name: str) -> None:
            times: dict[int, list[float]] = {rows: [] for rows in ROWS}
            for _ in range(given.repeats):
                for rows in ROWS:
                    call: Callable[..., float] = step_ms
                    times[rows].append(own.submit(call, model, slot, rows).result())
            print(f"{name:24}", *(f"{rows} rows {median(times[rows]):6.1f}" for rows in ROWS), flush=True)

        show("one team")
        other.submit(compute).result()
        show("and one that rests")


if __name__ == "__main__":
    main()
