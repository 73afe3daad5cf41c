"""The two ways to run a network over placed rows: on a KV tree in one forward, or without a cache, path by path.

Both are driven by `HuggingFaceModel`. The second is slow and right for every causal model: it serves those that the
load probe refuses.

Legend: T wanted rows, V vocabulary, B entries, Q rows of each (padded).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rootward.engine.attention import Visibility, Windows
from rootward.engine.batch import Size, Step, assemble, split
from rootward.engine.kv_cache import Pool, slot_cache
from rootward.engine.kv_tree import Ints, Placement
from rootward.ports import Rows

# What a forward costs beyond its rows, in rows: measured on a CPU; on an accelerator launches dwarf rows.
OVERHEAD_ROWS = {"cpu": 32}


class ForwardPass(Protocol):
    """Runs the network; told afterwards what became of the cells."""

    def run(self, batch: Sequence[Rows], plans: Sequence[Placement], kept: Sequence[range]) -> torch.Tensor:
        """Logits [T, V] of the wanted rows, in the order of the batch."""

    def commit(self, slot: int, cells: Ints) -> None:
        """These cells of the slot, top first, are committed now."""

    def close(self, slot: int, end: int) -> None:
        """The slot is empty; `end` was its high-water mark."""


class TreePass:
    """One forward for all entries, on the KV trees; two where long prompts meet narrow trees.

    `ragged`: the network takes a mask of the rows whose logits are wanted (the load probe finds out).
    """

    def __init__(self, network: Any, size: Size, windows: Windows, *, ragged: bool):
        self.network, self.device, self.ragged = network, network.device, ragged
        self.pool = Pool(size)
        self.cache = slot_cache(self.pool, network.config.get_text_config().num_hidden_layers)
        self.visibility = Visibility(size.num_slots, size.num_cells, windows, network.dtype, network.device)
        self.overhead = OVERHEAD_ROWS.get(self.device.type, 1024)
        self.can_slice = "logits_to_keep" in inspect.signature(network.forward).parameters

    def run(self, batch: Sequence[Rows], plans: Sequence[Placement], kept: Sequence[range]) -> torch.Tensor:
        parts = split([plan.num_rows for plan in plans], self.overhead)
        if len(parts) == 1:
            return self._run(batch, plans, kept)
        found: dict[int, torch.Tensor] = {}
        for part in parts:
            mine = [kept[i] for i in part]
            logits = self._run([batch[i] for i in part], [plans[i] for i in part], mine)
            found.update(zip(part, torch.split(logits, list(map(len, mine))), strict=True))
        return torch.cat([found[i] for i in range(len(batch))])

    def _run(self, batch: Sequence[Rows], plans: Sequence[Placement], kept: Sequence[range]) -> torch.Tensor:
        step = assemble(batch, plans, kept, self.pool.size, self.device)
        self.pool.step = step
        try:
            logits = self._logits(step)
        finally:
            self.pool.step = None
        return logits if step.restore is None else logits[step.restore]

    def _logits(self, step: Step) -> torch.Tensor:
        mask = self.visibility.mask(step)
        if step.keep is None:
            return self._forward(step, mask).flatten(0, 1)
        if self.can_slice and len(step.slots) == 1:
            return self._forward(step, mask, logits_to_keep=step.keep[0].nonzero()[:, 0])[0]
        if self.can_slice and self.ragged:
            return self._forward(step, mask, logits_to_keep=step.keep)
        return self._forward(step, mask)[step.keep]

    def _forward(self, step: Step, mask: Any, **kwargs: Any) -> torch.Tensor:
        out = self.network(
            input_ids=step.ids,
            position_ids=step.positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            **kwargs,
        )
        logits: torch.Tensor = out.logits
        return logits

    def commit(self, slot: int, cells: Ints) -> None:
        self.visibility.commit(slot, cells)

    def close(self, slot: int, end: int) -> None:
        self.visibility.clear(slot)
        for layer in self.cache.layers:
            layer.wipe(slot, end)


class PathPass:
    """A cache-free forward per leaf: exact for whatever the network does inside, at the price of its whole context."""

    def __init__(self, network: Any, num_slots: int, num_cells: int):
        self.network, self.device = network, network.device
        self.token = np.zeros((num_slots, num_cells), dtype=np.int64)  # what each cell holds
        self.committed: list[list[int]] = [[] for _ in range(num_slots)]

    def run(self, batch: Sequence[Rows], plans: Sequence[Placement], kept: Sequence[range]) -> torch.Tensor:
        wanted = []
        for rows, plan, keep in zip(batch, plans, kept, strict=True):
            self.token[rows.slot, plan.cells] = rows.token
            by_row = self._rows(rows.slot, plan, set(keep))
            wanted += [by_row[row] for row in keep]
        return torch.stack(wanted)

    def _rows(self, slot: int, plan: Placement, missing: set[int]) -> dict[int, torch.Tensor]:
        """Logits [V] by new row. The forward over a path answers every wanted row on it."""
        old = len(plan.scratch) - plan.num_rows
        found: dict[int, torch.Tensor] = {}
        while missing:
            path = np.flatnonzero(plan.sees[max(missing)])
            path = path[np.argsort(plan.position[path])]
            tokens = self.committed[slot] + self.token[slot, plan.scratch[path]].tolist()
            logits = self.network(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits[0]
            for i, row in enumerate((path - old).tolist()):
                if row in missing:
                    found[row] = logits[len(self.committed[slot]) + i]
                    missing.discard(row)
        return found

    def commit(self, slot: int, cells: Ints) -> None:
        self.committed[slot] += self.token[slot, cells].tolist()

    def close(self, slot: int, end: int) -> None:
        self.committed[slot] = []
