"""A copy of a model whose logits carry Gaussian noise, fixed per (context, token): a dial for the mismatch of a pair.

Legend: T rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import torch

from rootward.engine.atoms import reduced
from rootward.engine.slots import kept_rows
from rootward.ports import COMMITTED, LanguageModel, ModelInfo, Reduction, Rows


class NoisyModel:
    """`LanguageModel` over another one: logits + std · N(0, 1), the noise a function of (seed, context, token) alone.

    The context of a row is known by a hash chained over its tokens, so the same text gets the same noise in any tree.
    """

    def __init__(self, inner: LanguageModel, std: float, seed: int = 0) -> None:
        if not 0 <= std < float("inf"):
            raise ValueError(f"noise: {std} is negative or not finite; give a standard deviation of the logits")
        self.inner, self.std, self.seed = inner, std, seed
        self._committed: dict[int, int] = {}  # hash of the committed tokens, by slot
        self._nodes: dict[int, dict[int, int]] = {}  # hash of the text down to a node, by slot and node

    @property
    def info(self) -> ModelInfo:
        info = self.inner.info
        return replace(info, name=f"{info.name} + noise {self.std:g}", fingerprint=f"{info.fingerprint}+{self.std:g}")

    @property
    def num_free_slots(self) -> int:
        return self.inner.num_free_slots

    @property
    def block_size(self) -> int:
        return self.inner.block_size

    @property
    def num_blocks(self) -> int:
        return self.inner.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.inner.num_free_blocks

    def blocks_needed(self, slot: int, num_rows: int) -> int:
        return self.inner.blocks_needed(slot, num_rows)

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        slot = self.inner.open(tokens, salt=salt)
        self._committed[slot], self._nodes[slot] = self.seed, {}
        for token in tokens[: self.inner.length(slot)]:
            self._committed[slot] = extend(self._committed[slot], token)
        return slot

    def close(self, slot: int) -> None:
        self.inner.close(slot)

    def length(self, slot: int) -> int:
        return self.inner.length(slot)

    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Logits [T, V] of the inner model plus noise."""
        logits_TV = self.inner.forward(batch, num_logits=num_logits)
        hashes: list[int] = []
        for rows, kept in zip(batch, kept_rows(batch, num_logits), strict=True):
            below = self._hashed(rows)
            hashes += [below[i] for i in kept]
        noise_TV = np.stack([_noise(h, logits_TV.shape[1]) for h in hashes])
        return reduced(logits_TV + self.std * torch.from_numpy(noise_TV).to(logits_TV), reduction)

    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        self.inner.commit(slot, node, keep_below=keep_below)
        self._committed[slot] = self._nodes[slot][node]
        if not keep_below:
            self._nodes[slot] = {}

    def release(self, slot: int, keep: Collection[int] = ()) -> None:
        self.inner.release(slot, keep)
        self._nodes[slot] = {node: text for node, text in self._nodes[slot].items() if node in keep}

    def _hashed(self, rows: Rows) -> list[int]:
        """The hash of the text down to each new node."""
        known, out = self._nodes[rows.slot], []
        for node, parent, token in zip(rows.node.tolist(), rows.parent.tolist(), rows.token.tolist(), strict=True):
            above = self._committed[rows.slot] if parent == COMMITTED else known[parent]
            known[node] = extend(above, token)
            out.append(known[node])
        return out


def extend(above: int, token: int) -> int:
    """The hash of a text and one more token."""
    packed = above.to_bytes(8, "little") + token.to_bytes(8, "little")
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def _noise(hash_: int, vocab: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(hash_)).standard_normal(vocab, dtype=np.float32)
