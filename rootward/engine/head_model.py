"""A draft head behind `ports.DraftModel`: rows of text carry features of the target, drafted rows the head's own output above them.

So whatever grows trees from a draft model grows them from a head. The text of a slot may begin anywhere in the session's: positions are
relative. Committed rows are always read with features (`Rows.features`), so nothing that was drafted is kept for the next round.

Legend: N rows, T wanted rows, E hidden size of the head, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.engine.batch import Step
from rootward.engine.heads import Head
from rootward.engine.kv_cache import PagedCache
from rootward.engine.slots import Entry, Size, Slots, kept_rows
from rootward.ports import COMMITTED, ModelInfo, Reduction, Rows

BLOCK_SIZE = 16
TREE_ROOM = 256  # cells of a slot beyond its context


class DraftHead(Slots, ABC):
    """A draft model whose rows of text need features of the target (`HeadModel`, `block_head_model.BlockHeadModel`).

    head           a `Head` or a `BlockHead`
    target         what the target is, whose tokenizer and end-of-text tokens are the head's
    fingerprint    of its files; "": the name

    num_marginals  of a block head: rows that a forward gives for each wanted row of text, of the tokens after it whatever lies between;
                   there are no drafted rows then. 0: one, and drafted rows are asked for
    reads          hidden states of the target that features are made of (`ports.LanguageModel.expose`)
    window         positions of a text, its last one included, beyond which nothing changes the logits there; None: there is no such number
    feature_size   numbers of a feature
    """

    def __init__(self, head: Any, target: ModelInfo, *, name: str, max_slots: int = 8, fingerprint: str = ""):
        self.head = head
        size = Size.of(max_slots, target.max_positions, TREE_ROOM, BLOCK_SIZE, None)
        super().__init__(size, target.vocab_size, f"{target.fingerprint}/{name}")
        self._kv = PagedCache(size, head.windows)
        self.info = replace(target, name=name, fingerprint=fingerprint or name)
        self.num_marginals: int = head.depth
        self.reads: tuple[int, ...] = head.states
        # Of several layers, each sees further than the one before it.
        self.window: int | None = head.windows[0] if len(head.windows) == 1 else None
        self.feature_size: int = head.hidden_size

    @torch.inference_mode()
    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        """float32[N, feature_size]: features by these states."""
        fused: torch.Tensor = self.head.fuse(states_NS)
        return fused

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        """Nothing is shared: what a head keeps of a text depends on where its features began."""
        return super().open()

    @abstractmethod
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Logits [T, V], or [T · num_marginals, V], -inf outside the draft vocabulary; or what a reduction makes of them."""

    @torch.inference_mode()
    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        self._kv.move(self.commit_cells(slot, node, keep_below=keep_below), self.head.device)


class HeadModel(DraftHead):
    """A head of one layer."""

    head: Head

    def __init__(self, head: Head, target: ModelInfo, *, name: str, max_slots: int = 8, fingerprint: str = ""):
        super().__init__(head, target, name=name, max_slots=max_slots, fingerprint=fingerprint)
        # By slot and node: features for its children.
        self._passed_on: list[dict[int, torch.Tensor]] = [{} for _ in range(max_slots)]

    def close(self, slot: int) -> None:
        super().close(slot)
        self._passed_on[slot] = {}

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        kept = kept_rows(batch, num_logits)
        head = self.head
        with self.placed(batch) as entries:
            step = Step(entries, kept, self.size, head.device, pad=not head.has_kernels)
            logits, passed_on = head(step, self._kv.layers[0], self._features(entries, step))
        rows = passed_on.unbind(0)
        for first, entry, keep in zip(step.offsets, entries, kept, strict=True):
            own = self._passed_on[entry.rows.slot]
            for i in keep:
                own[int(entry.rows.node[i])] = rows[first + i]
        return head.output.in_target_ids(logits, reduction)

    @torch.inference_mode()
    def expanded(self, step: Step, features: NDArray[np.float32], reduction: Reduction) -> tuple[Any, Any]:
        """(the reduction of the logits of the wanted rows, what all rows pass on, float32[N, E]), for rows that the caller has placed."""
        logits, passed_on = self.head(step, self._kv.layers[0], torch.from_numpy(features))
        return self.head.output.in_target_ids(logits, reduction).numpy(), passed_on.numpy()

    def _features(self, entries: Sequence[Entry], step: Step) -> torch.Tensor:
        """float32[N, E]; rows of padding repeat the first of their entry."""
        parts: list[torch.Tensor] = []
        for entry in entries:
            rows, known = entry.rows, self._passed_on[entry.rows.slot]
            if rows.features is not None:
                wanted = entry.plan.num_rows, self.feature_size
                if rows.features.shape != wanted:
                    raise ValueError(f"features: shape {rows.features.shape}; give one row a token, {wanted}")
                own = torch.from_numpy(rows.features).to(self.head.device)
            else:
                own = torch.stack([known[parent] for parent in rows.parent.tolist()])
            parts.append(own)
            if not self.head.has_kernels:
                parts.append(own[:1].expand(step.width - len(own), -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        super().commit(slot, node, keep_below=keep_below)
        own = self._passed_on[slot]
        if node in own:
            own[COMMITTED] = own.pop(node)
        self._forget(slot)

    def release(self, slot: int, keep: Collection[int] = ()) -> None:
        super().release(slot, keep)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        """Drop the features of nodes that the slot no longer holds."""
        tree, own = self.tree(slot), self._passed_on[slot]
        self._passed_on[slot] = {node: row for node, row in own.items() if node == COMMITTED or node in tree}
