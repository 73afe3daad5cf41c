"""A block head behind `head_model.DraftHead`: rows of text write keys and values, and a pass over a block after each wanted one gives the
distributions of all tokens that follow, whatever lies between.

So there are no drafted rows: the grower has the rows of all depths of a tree with that of its root (`num_marginals`), every strategy
that grows trees from a draft model grows them from marginals, and chosen trees grown best-first are those of DDTree (2604.12989).

Legend: A blocks, M marginals of a block, T wanted rows, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rootward.engine.block_head import BlockHead
from rootward.engine.head_model import DraftHead
from rootward.engine.slots import kept_rows
from rootward.ports import Reduction, Rows


class BlockHeadModel(DraftHead):
    """A block head."""

    head: BlockHead

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        kept = kept_rows(batch, num_logits)
        head, layers = self.head, self._kv.layers
        features = [rows.features for rows in batch if rows.features is not None]
        if len(features) < len(batch):
            raise ValueError("features: missing; a block head reads text alone")
        with self.placed(batch) as entries:
            cells = np.concatenate([entry.table.cells(entry.plan.cells) for entry in entries])
            positions = np.concatenate([entry.plan.positions for entry in entries])
            head.write(self._there(np.concatenate(features)), self._there(positions), self._there(cells), layers)
            wanted = [(entry, row) for entry, rows in zip(entries, kept, strict=True) for row in rows]
            length = np.array([entry.plan.positions[row] + 1 for entry, row in wanted])
            before = np.stack([np.resize(entry.cells_seen(row), length.max()) for entry, row in wanted])
            token = np.array([entry.rows.token[row] for entry, row in wanted])
            logits = head(self._there(token), self._there(length), self._there(before), layers)
        return head.output.in_target_ids(logits.flatten(0, 1), reduction)

    def _there(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.head.device)
