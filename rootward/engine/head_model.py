"""A draft head behind `ports.LanguageModel`: rows of text carry features of the target, drafted rows the head's own output above them.

So whatever grows trees from a draft model grows them from a head. The text of a slot may begin anywhere in the session's: positions are
relative. Committed rows are always read with features (`Rows.features`), so nothing that was drafted is kept for the next round.

Legend: N rows, T wanted rows, E hidden size of the head, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from rootward.engine.batch import Step
from rootward.engine.heads import Head
from rootward.engine.kv_cache import PagedCache
from rootward.engine.slots import Entry, Size, Slots, SlottedModel, kept_rows
from rootward.ports import COMMITTED, LanguageModel, ModelInfo, Reduction, Rows

BLOCK_SIZE = 16
TREE_ROOM = 256  # cells of a slot beyond its context


class DraftHead(LanguageModel, Protocol):
    """A language model whose rows of text need features of the target.

    reads          hidden states of the target that features are made of (`LanguageModel.expose`)
    feature_size   numbers of a feature
    num_marginals  of a block head: rows that a forward gives for each wanted row of text, of the tokens after it whatever lies between;
                   there are no drafted rows then. 0: one, and drafted rows are asked for
    """

    @property
    def num_marginals(self) -> int: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    @property
    def feature_size(self) -> int: ...

    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        """float32[N, feature_size]: features by these states."""


class SlottedHead(SlottedModel):
    """What heads have in common behind `DraftHead`. `target`: what the target is, whose tokenizer and end-of-text tokens are the head's.

    windows  of its layers: the sliding window, or None
    """

    @property
    def num_marginals(self) -> int:
        return 0

    def __init__(
        self,
        head: Any,
        target: ModelInfo,
        *,
        windows: Sequence[int | None],
        name: str,
        max_slots: int = 8,
        fingerprint: str = "",
    ):
        self.head = head
        size = Size.of(max_slots, target.max_positions, TREE_ROOM, BLOCK_SIZE, None)
        self._slots = Slots(size, target.vocab_size, f"{target.fingerprint}/{name}")
        self._kv = PagedCache(size, windows)
        self._info = replace(target, name=name, fingerprint=fingerprint or name)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def reads(self) -> tuple[int, ...]:
        states: tuple[int, ...] = self.head.states
        return states

    @property
    def feature_size(self) -> int:
        size: int = self.head.hidden_size
        return size

    @torch.inference_mode()
    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.head.fuse(states_NS)
        return fused

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        """Nothing is shared: what a head keeps of a text depends on where its features began."""
        return self._slots.open()

    @torch.inference_mode()
    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        self._kv.move(self._slots.commit(slot, node, keep_below=keep_below), self.head.device)

    def expose(self, states: Sequence[int]) -> None:
        """A head has no head."""

    @property
    def states(self) -> torch.Tensor:
        raise RuntimeError("states: a draft head exposes none")


class HeadModel(SlottedHead):
    """Implements `DraftHead` for a head of one layer."""

    head: Head

    def __init__(self, head: Head, target: ModelInfo, *, name: str, max_slots: int = 8, fingerprint: str = ""):
        super().__init__(head, target, windows=[None], name=name, max_slots=max_slots, fingerprint=fingerprint)
        self._passed_on: list[dict[int, torch.Tensor]] = [
            {} for _ in range(max_slots)
        ]  # by node: features for its children

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        slot = super().open()
        self._passed_on[slot] = {}
        return slot

    def close(self, slot: int) -> None:
        super().close(slot)
        self._passed_on[slot] = {}

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Logits [T, V], -inf outside the draft vocabulary; or what a reduction makes of them."""
        kept = kept_rows(batch, num_logits)
        head, device = self.head, self.head.device
        with self._slots.placed(batch) as entries:
            step = Step(entries, kept, self._slots.size, device, pad=not head.has_kernels)
            logits, passed_on = head(step, self._kv.layers[0], self._features(entries, step))
        rows = passed_on.unbind(0)
        width = 0 if head.has_kernels else step.width
        at = 0
        for b, (entry, keep) in enumerate(zip(entries, kept, strict=True)):
            first = b * width if width else at
            own = self._passed_on[entry.rows.slot]
            for i in keep:
                own[int(entry.rows.node[i])] = rows[first + i]
            at += entry.plan.num_rows
        return head.output.in_target_ids(logits, reduction)

    def _features(self, entries: Sequence[Entry], step: Step) -> torch.Tensor:
        """float32[N, E]."""
        head = self.head
        padded = not head.has_kernels
        parts: list[torch.Tensor] = []
        for entry in entries:
            rows, known = entry.rows, self._passed_on[entry.rows.slot]
            if rows.features is not None:
                own = torch.from_numpy(rows.features).to(head.device)
            else:
                own = torch.stack([known[parent] for parent in rows.parent.tolist()])
            if padded and len(own) < step.width:
                own = torch.cat([own, own[:1].expand(step.width - len(own), -1)])
            parts.append(own)
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
        """Of nodes that are held no longer."""
        tree, own = self._slots[slot], self._passed_on[slot]
        self._passed_on[slot] = {node: row for node, row in own.items() if node == COMMITTED or node in tree}
