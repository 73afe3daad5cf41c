"""A block head behind `head_model.DraftHead`: rows of text write keys and values, and one pass over a block gives the marginals after them.

A drafted row answers with the marginal of its position, whatever its path is: nothing is computed for it. So every strategy that grows
trees from a draft model grows them from marginals, and `marginals` grows the trees of DDTree (2604.12989). Rows deeper than the marginals
have no distribution, hence no children.

Legend: N context rows, A blocks, M marginals of a block, T wanted rows, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rootward.core.arrays import Ints
from rootward.engine.block_head import BlockHead, Blocks
from rootward.engine.head_model import SlottedHead
from rootward.engine.slots import Entry, kept_rows
from rootward.ports import ModelInfo, Reduction, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Marginals:
    """Of one pass. position: of the last token of the text; logits [M, V'] of the tokens after it."""

    position: int
    logits: torch.Tensor

    def after(self, positions: Ints) -> torch.Tensor:
        """[n, V'] of the tokens after these positions; -inf beyond them."""
        place = positions - self.position
        last = len(self.logits) - 1
        rows = self.logits[torch.from_numpy(place.clip(max=last)).to(self.logits.device)]
        if place.max() > last:
            rows[torch.from_numpy(place > last).to(rows.device)] = -torch.inf
        return rows


class BlockHeadModel(SlottedHead):
    """Implements `DraftHead` for a block head."""

    head: BlockHead

    def __init__(self, head: BlockHead, target: ModelInfo, *, name: str, max_slots: int = 8, fingerprint: str = ""):
        windows = [layer.window for layer in head.layers]
        super().__init__(head, target, windows=windows, name=name, max_slots=max_slots, fingerprint=fingerprint)
        self._marginals: dict[int, Marginals] = {}  # by slot

    def close(self, slot: int) -> None:
        super().close(slot)
        self._marginals.pop(slot, None)

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Logits [T, V], -inf outside the draft vocabulary; or what a reduction makes of them. One pass for all blocks."""
        kept = kept_rows(batch, num_logits)
        with self._slots.placed(batch) as entries:
            work = list(zip(entries, kept, strict=True))
            text = [(entry, rows) for entry, rows in work if entry.rows.features is not None]
            first_TV = self._read(text) if text else torch.empty(0)
        parts: list[torch.Tensor] = []
        for entry, rows in work:
            if entry.rows.features is None:
                marginals = self._marginals[entry.rows.slot]
                parts.append(marginals.after(entry.plan.positions[rows.start : rows.stop]))
            else:
                parts.append(first_TV[: len(rows)])
                first_TV = first_TV[len(rows) :]
        return self.head.output.in_target_ids(torch.cat(parts), reduction)

    def _read(self, text: Sequence[tuple[Entry, range]]) -> torch.Tensor:
        """Write the keys and values of these rows, and run a block after each of those that are wanted. Returns the marginals [T, V'] of
        the next token; the whole block after an entry's last row is kept for its drafted rows."""
        head, layers = self.head, self._kv.layers
        entries = [entry for entry, _ in text]
        features = np.concatenate([entry.rows.features for entry in entries if entry.rows.features is not None])
        cells = np.concatenate([entry.table.cells(entry.plan.cells) for entry in entries])
        positions = np.concatenate([entry.plan.positions for entry in entries])
        head.write(self._there(features), self._there(positions), self._there(cells), layers)
        wanted = [(entry, row) for entry, rows in text for row in rows]
        length = np.array([entry.plan.positions[row] + 1 for entry, row in wanted])
        before = np.stack([np.resize(_cells_before(entry, row), length.max()) for entry, row in wanted])
        token = np.array([entry.rows.token[row] for entry, row in wanted])
        logits = head(Blocks(self._there(token), self._there(length), self._there(before)), layers)
        last = np.cumsum([len(rows) for _, rows in text]) - 1
        for (entry, _), a in zip(text, last.tolist(), strict=True):
            self._marginals[entry.rows.slot] = Marginals(int(length[a]) - 1, logits[a])
        return logits[:, 0]

    def _there(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.head.device)


def _cells_before(entry: Entry, row: int) -> Ints:
    """Cells that a row sees, its own the last, in the order of positions."""
    plan = entry.plan
    seen = np.flatnonzero(plan.sees[row])
    seen = seen[np.argsort(plan.position[seen], kind="stable")]
    return entry.table.cells(np.concatenate([np.arange(plan.length), plan.scratch[seen]]))
