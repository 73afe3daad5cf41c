"""What the sessions of a model hold, as a test sees it, and the slow truth about it: one cache-free forward per path.

Nothing here looks behind `ports.LanguageModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from unit.engine.networks import own_attention

from rootward.ports import COMMITTED, LanguageModel, Rows

PREFILL = 1000  # id of the first node of a chunk of prefill


@dataclass
class Session:
    """A slot: its committed tokens, and the path of tokens to every uncommitted node."""

    model: LanguageModel
    slot: int
    tokens: list[int] = field(default_factory=list)
    paths: dict[int, list[int]] = field(default_factory=lambda: {COMMITTED: []})

    def grow(self, parents: Sequence[int], tokens: Sequence[int], first: int = 0) -> Rows:
        """Rows of new nodes `first`, `first` + 1, …"""
        nodes = list(range(first, first + len(tokens)))
        for node, parent, token in zip(nodes, parents, tokens, strict=True):
            self.paths[node] = [*self.paths[parent], token]
        return Rows(self.slot, np.array(nodes), np.array(parents), np.array(tokens))

    def chain(self, tokens: Sequence[int]) -> Rows:
        return self.grow([COMMITTED, *range(PREFILL, PREFILL + len(tokens) - 1)], tokens, PREFILL)

    def commit(self, node: int, *, keep_below: bool = False) -> None:
        self.model.commit(self.slot, node, keep_below=keep_below)
        path = self.paths[node]
        self.tokens += path
        below = {
            n: p[len(path) :] for n, p in self.paths.items() if p[: len(path)] == path and n not in (node, COMMITTED)
        }
        self.paths = {COMMITTED: [], **(below if keep_below else {})}

    def release(self) -> None:
        self.model.release(self.slot)
        self.paths = {COMMITTED: []}

    def truth(self, network: Any, rows: Rows, gap: int = 0) -> torch.Tensor:
        """Logits [Q, V] of the rows. `gap`: what is not committed yet stands so many positions too far."""
        return torch.stack([last_logits(network, self.tokens, self.paths[int(node)], gap) for node in rows.node])


@torch.inference_mode()
def last_logits(network: Any, committed: Sequence[int], path: Sequence[int], gap: int = 0) -> torch.Tensor:
    """Logits [V] after `committed` + `path`, without a cache. The mask of ones keeps a gap from reading as two texts."""
    ids = torch.tensor([[*committed, *path]])
    told: dict[str, torch.Tensor] = {}
    if gap:
        positions = torch.arange(ids.shape[1])
        positions[len(committed) :] += gap
        told = {"position_ids": positions[None], "attention_mask": torch.ones_like(ids)}
    with own_attention(network):
        logits: torch.Tensor = network(input_ids=ids, use_cache=False, **told).logits
    return logits[0, -1].float()


def error(logits: torch.Tensor, expected: Sequence[torch.Tensor]) -> float:
    """Largest difference over the largest logit; infinite for NaN."""
    right = torch.cat(list(expected))
    return float(((logits - right).abs().max() / right.abs().max()).nan_to_num(nan=torch.inf))
