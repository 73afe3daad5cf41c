"""A small network as transformers has it and in fewer operations (`rootward/engine/lean.py`): the same forwards, in turns.

    python -m benchmarks.micro.lean_forward [--model FOLDER] [--rows 1 2 4] [--turns 3]

Medians in milliseconds, on one thread, behind a text of 128 tokens: warm, forwards one after the other; cold, with 120 MB written in
between, as a large target leaves the caches. Then how many operations torch was asked for in one forward.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rootward.demo import paths
from rootward.engine.model import HuggingFaceModel
from rootward.ports import COMMITTED, Rows

TEXT, WARM, COLD = 128, 300, 60


class Served:
    """One form of the network."""

    def __init__(self, folder: str, *, lean: bool) -> None:
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = HuggingFaceModel(network, name=folder, max_slots=1, lean=lean)
        assert (self.model.lean is not None) == lean, f"{folder}: not a network that there are two forms of"
        self.slot, self.next_id = self.model.open(), TEXT
        self.model.forward([Rows.chain(self.slot, 0, list(range(10, 10 + TEXT)))], num_logits=[1])
        self.model.commit(self.slot, TEXT - 1, keep_below=False)

    def forward_ms(self, num_rows: int) -> float:
        """Of siblings below the text."""
        ids = np.arange(self.next_id, self.next_id + num_rows)
        self.next_id += num_rows
        start_s = time.perf_counter()
        self.model.forward([Rows(self.slot, ids, np.full(num_rows, COMMITTED), np.arange(num_rows) + 5)])
        seconds = time.perf_counter() - start_s
        self.model.release(self.slot)
        return 1e3 * seconds


class Counting(TorchDispatchMode):
    """How many operations reach torch."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--model", default=str(paths().draft))
    about.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    about.add_argument("--turns", type=int, default=3)
    given = about.parse_args()
    torch.set_num_threads(1)
    forms = {"as it is": Served(given.model, lean=False), "in fewer operations": Served(given.model, lean=True)}
    caches = torch.zeros(30_000_000)
    for _ in range(given.turns):
        for num_rows in given.rows:
            for cold in (False, True):
                found = []
                for form in forms.values():
                    times = []
                    for _ in range(COLD if cold else WARM):
                        if cold:
                            caches.add_(1.0)
                        times.append(form.forward_ms(num_rows))
                    found.append(median(times))
                print(f"{'cold' if cold else 'warm'} {num_rows} rows {found[0]:6.2f} {found[1]:6.2f}", flush=True)
    for name, form in forms.items():
        with Counting() as counting:
            form.forward_ms(2)
        print(f"{name}: {counting.num} operations")


if __name__ == "__main__":
    main()
