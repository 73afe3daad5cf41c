"""A language model that is a table of exact distributions, generated from a seed. For tests and simulations.

The next token depends on the last `order` tokens. The model stores its context in the same KV trees and blocks as a real model, one token
per cell, and reads it through the block table and the ancestor mask, so a wrong tree or table changes its output.

Legend: T rows of the batch, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.engine.atoms import reduced
from rootward.engine.slots import Entry, Size, Slots, kept_rows
from rootward.ports import LosslessLevel, ModelInfo, Reduction, Rows

MAX_CACHED_LAWS = 65536


class TabularModel(Slots):
    """Log-probabilities float64[V] for every context, a pure function of the arguments.

    sharpness  standard deviation of the logits: 0 is uniform, 5 nearly deterministic
    zeros      share of the vocabulary without probability (at least one token keeps some)
    eos        id of the end-of-text token, if the model has one
    noise      standard deviation of a perturbation on top, from `noise_seed` (a draft of the model without it)
    step_ms    least duration of a forward pass: the thread sleeps for the rest, like for a device
    tree_room  cells of a slot beyond `max_positions`, for trees
    kv_cache_tokens, block_size  as of a real model: cells of all sessions together, and of a block
    """

    def __init__(
        self,
        vocab: int,
        seed: int = 0,
        order: int = 2,
        *,
        max_positions: int = 4096,
        sharpness: float = 1.0,
        zeros: float = 0.0,
        eos: int | None = None,
        noise: float = 0.0,
        noise_seed: int = 0,
        step_ms: float = 0.0,
        max_slots: int = 8,
        tree_room: int = 1024,
        kv_cache_tokens: int | None = None,
        block_size: int = 16,
    ):
        self.vocab, self.seed, self.order, self.sharpness, self.zeros = vocab, seed, order, sharpness, zeros
        self.eos, self.noise, self.noise_seed, self.step_ms = eos, noise, noise_seed, step_ms
        self._check(max_positions)
        size = Size.of(max_slots, max_positions, tree_room, block_size, kv_cache_tokens)
        self._token = np.zeros(size.storage, dtype=np.int64)  # what each cell holds
        self._log_law = lru_cache(MAX_CACHED_LAWS)(self._compute)  # by the last `order` tokens
        self._exposed: tuple[int, ...] = ()
        self._last: list[Entry] = []  # of the last forward
        self.info = self._describe(max_positions)
        super().__init__(size, vocab, self.info.fingerprint)

    def _check(self, max_positions: int) -> None:
        """ValueError that names the first argument out of range."""
        bounds = (
            ("vocab", self.vocab, self.vocab >= 1, "is below 1"),
            ("order", self.order, self.order >= 0, "is negative"),
            ("max_positions", max_positions, max_positions >= 1, "is below 1"),
            ("sharpness", self.sharpness, self.sharpness >= 0, "is negative"),
            ("zeros", self.zeros, 0 <= self.zeros <= 1, "is outside [0, 1]"),
            ("eos", self.eos, self.eos is None or 0 <= self.eos < self.vocab, f"is outside [0, {self.vocab})"),
            ("noise", self.noise, self.noise >= 0, "is negative"),
            ("step_ms", self.step_ms, self.step_ms >= 0, "is negative"),
        )
        for name, value, ok, why in bounds:
            if not ok:
                raise ValueError(f"{name}: {value!r} {why}")

    def _describe(self, max_positions: int) -> ModelInfo:
        law = f"tabular:vocab={self.vocab},seed={self.seed},order={self.order},sharpness={self.sharpness:g}"
        for key, value in (("zeros", self.zeros), ("noise", self.noise), ("noise_seed", self.noise_seed)):
            law += f",{key}={value:g}" if value else ""
        eos_ids = () if self.eos is None else (self.eos,)
        return ModelInfo(law, self.vocab, max_positions, eos_ids, fingerprint=law, lossless=LosslessLevel.BITWISE)

    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Log-probabilities float64[T, V], -inf for tokens without probability; or their reduction."""
        end_s = time.monotonic() + self.step_ms / 1e3
        kept = kept_rows(batch, num_logits)
        with self.placed(batch) as entries:
            for entry in entries:
                self._token[entry.table.cells(entry.plan.cells)] = entry.rows.token
        contexts = [self._context(entry, row) for entry, rows in zip(entries, kept, strict=True) for row in rows]
        self._last = entries if self._exposed else []
        found = reduced(torch.from_numpy(np.stack([self.log_law(context) for context in contexts])), reduction)
        if self.step_ms and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        return found

    def expose(self, states: Sequence[int]) -> None:
        self._exposed = tuple(states)

    @property
    def states(self) -> torch.Tensor:
        """float32[N, n]: state i is the token i positions before the row's own, -1 beyond `order`."""
        contexts = [self._context(entry, row)[::-1] for entry in self._last for row in range(entry.plan.num_rows)]
        return torch.tensor([[float((*c, *[-1] * (i + 1))[i]) for i in self._exposed] for c in contexts])

    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        moves = self.commit_cells(slot, node, keep_below=keep_below)
        self._token[moves.target] = self._token[moves.source]

    def law(self, context: Sequence[int]) -> NDArray[np.float64]:
        """float64[V]: the exact distribution of the next token."""
        law: NDArray[np.float64] = np.exp(self.log_law(context))
        return law

    def log_law(self, context: Sequence[int]) -> NDArray[np.float64]:
        """float64[V]: its logarithm. Read-only."""
        return self._log_law(tuple(map(int, context[max(0, len(context) - self.order) :])))

    def _compute(self, key: tuple[int, ...]) -> NDArray[np.float64]:
        rng = np.random.default_rng([1, self.seed, *(t + 1 for t in key)])
        logits = rng.normal(size=self.vocab) * self.sharpness
        dead = rng.permutation(self.vocab)[: min(int(self.zeros * self.vocab), self.vocab - 1)]
        if self.noise:
            noise = np.random.default_rng([2, self.noise_seed, *(t + 1 for t in key)])
            logits += noise.normal(size=self.vocab) * self.noise
        logits[dead] = -np.inf
        logits -= logits.max()
        logits -= math.log(np.exp(logits).sum())
        logits.flags.writeable = False
        return logits

    def _context(self, entry: Entry, row: int) -> list[int]:
        """The last tokens that the row sees."""
        cells = entry.cells_seen(row, start=max(0, entry.plan.length - self.order))
        tokens: list[int] = self._token[cells].tolist()
        return tokens
