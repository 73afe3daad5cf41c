"""Both models' rows in the draft's rank space, fetched for all contexts at once and kept.

Below one context every node is named by its *rank path*: rank r at a node is the r-th most likely token of the draft
row there. A row of K atoms is then q on ranks 0…K-1, and the target is p on the same ranks and one more symbol OTHER = K
for every token outside the atoms. No draft law has mass there, so OTHER only scales (algorithms.md, section 7) and
every verification algorithm gives on these K + 1 symbols exactly the stop law it has on the whole vocabulary.

Legend: T fetched rows, K atoms, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.contexts import prefill
from rootward.core.distribution import quantise_top
from rootward.core.requests import Sampling
from rootward.engine.sampling import gather, processed, top_atoms
from rootward.ports import COMMITTED, LanguageModel, Rows

Floats = NDArray[np.float64]
Path = tuple[int, ...]  # ranks from the root (excluded)
ROOT_ID, ROWS_OF_A_FORWARD, HELD_NODES = 0, 1 << 25, 160  # node id; logits of one forward; KV nodes kept per context


@dataclass(frozen=True, slots=True)
class Expansion:
    """What follows one node.

    ids     int32[K]      the draft's atoms by decreasing mass, -1 pad
    weight  int32[K]      their integer weights
    q       float64[K]    the draft law: weight / Σ weight
    p       float64[K+1]  the target law on the same ranks, then OTHER
    noise   float32[K]    Gumbel noise of the position at ids, shared by both sides
    choice  int           rank of the target's own token under that noise, K for OTHER
    """

    ids: NDArray[np.int32]
    weight: NDArray[np.int32]
    q: Floats
    p: Floats
    noise: NDArray[np.float32]
    choice: int


class Work(NamedTuple):
    """What one context wants: the paths whose rows are missing, and all paths to forward for them, ancestors first."""

    context: int
    paths: list[Path]
    lineage: list[Path]


class RankedRows:
    """The rows of a pair below some contexts at one temperature. A context manager: it holds a slot per context."""

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        contexts: Sequence[Sequence[int]],
        temperature: float,
        *,
        num_atoms: int = 64,
        seed: int = 0,
        first_context: int = 0,
        greedy_draft_temperature: float = 0.5,
    ) -> None:
        self.models, self.contexts, self.first_context = (target, draft), contexts, first_context
        self.vocab = min(target.info.vocab_size, draft.info.vocab_size)
        self.num_atoms, self.seed, self.temperature = min(num_atoms, self.vocab), seed, temperature
        self.laws = Sampling(temperature), Sampling(temperature or greedy_draft_temperature)
        self._known: list[dict[Path, Expansion]] = [{} for _ in contexts]
        self._held: list[dict[Path, int]] = [{} for _ in contexts]  # KV node by rank path
        self._noise: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.num_forwards = 0

    def __enter__(self) -> RankedRows:
        self._slots = tuple([model.open() for _ in self.contexts] for model in self.models)
        for model, slots in zip(self.models, self._slots, strict=True):
            prefill(model, slots, [text[:-1] for text in self.contexts])
        return self

    def __exit__(self, *_: object) -> None:
        for model, slots in zip(self.models, self._slots, strict=True):
            for slot in slots:
                model.close(slot)

    def __len__(self) -> int:
        return len(self.contexts)

    def get(self, context: int, path: Path) -> Expansion | None:
        return self._known[context].get(path)

    def at(self, context: int, path: Path) -> Expansion:
        return self._known[context][path]

    def fetch(self, wanted: Iterable[tuple[int, Path]]) -> None:
        """Learn the rows of these nodes (their parents' are known), many contexts in one forward of each model."""
        new: dict[int, list[Path]] = {}
        for context, path in dict.fromkeys(wanted):
            if path not in self._known[context]:
                new.setdefault(context, []).append(path)
        work = [Work(context, paths, self._unheld(context, paths)) for context, paths in new.items()]
        for group in _alike(work, ROWS_OF_A_FORWARD // self.vocab):
            self._forward(group)

    def release(self) -> None:
        """Forget the KV of all nodes; the rows stay."""
        for context in range(len(self)):
            self._release(context)

    def _release(self, context: int) -> None:
        for model, slots in zip(self.models, self._slots, strict=True):
            model.release(slots[context])
        self._held[context] = {}

    def _unheld(self, context: int, paths: list[Path]) -> list[Path]:
        """The paths and those of their ancestors whose KV is not held, ancestors first."""
        if len(self._held[context]) > HELD_NODES:
            self._release(context)
        held = self._held[context]
        lineage: dict[Path, None] = {}
        for path in paths:
            lineage |= {path[:i]: None for i in range(len(path) + 1) if path[:i] not in held}
        return sorted(lineage, key=len)

    def _forward(self, part: list[Work]) -> None:
        columns = [self._columns(context, lineage) for context, _, lineage in part]
        take, top = [], 0
        for _, paths, lineage in part:
            place = {path: top + i for i, path in enumerate(lineage)}
            take += [place[path] for path in paths]
            top += len(lineage)
        logits = []
        for model, slots in zip(self.models, self._slots, strict=True):
            batch = [Rows(slots[c], *three) for (c, _, _), three in zip(part, columns, strict=True)]
            logits.append(model.forward(batch)[take][:, : self.vocab])
        self.num_forwards += 1
        self._learn([(context, path) for context, paths, _ in part for path in paths], logits[0], logits[1])

    def _columns(self, context: int, lineage: list[Path]) -> NDArray[np.int64]:
        """int64[3, Q]: node, parent, token of the new KV nodes."""
        held, rows = self._held[context], []
        for path in lineage:
            if path:
                parent, token = held[path[:-1]], int(self._known[context][path[:-1]].ids[path[-1]])
            else:
                parent, token = COMMITTED, int(self.contexts[context][-1])
            held[path] = len(held)
            rows.append((held[path], parent, token))
        return np.array(rows, dtype=np.int64).T

    def _learn(self, names: list[tuple[int, Path]], target_TV: torch.Tensor, draft_TV: torch.Tensor) -> None:
        num = len(names)
        q_TV = processed(draft_TV, [self.laws[1]] * num)
        ids_TK, weight_TK = quantise_top(*top_atoms(q_TV, self.num_atoms))
        p_TV = processed(target_TV, [self.laws[0]] * num)
        p_TK, tail_T = gather(p_TV, ids_TK)
        p_TK1 = np.concatenate([p_TK, tail_T[:, None]], axis=1)
        p_TK1 /= p_TK1.sum(axis=1, keepdims=True)
        q_TK = weight_TK / weight_TK.sum(axis=1, keepdims=True)
        noise_TV = torch.from_numpy(np.stack([self._gumbel(context, len(path)) for context, path in names]))
        own_T = (p_TV.log() + noise_TV).argmax(-1).numpy()
        noise_TK = np.take_along_axis(noise_TV.numpy(), np.maximum(ids_TK, 0), axis=1)
        same_TK = ids_TK == own_T[:, None]
        choice_T = np.where(same_TK.any(axis=1), same_TK.argmax(axis=1), self.num_atoms)
        columns = zip(ids_TK.astype(np.int32), weight_TK.astype(np.int32), q_TK, p_TK1, noise_TK, choice_T, strict=True)
        for (context, path), (ids, weight, q, p, noise, choice) in zip(names, columns, strict=True):
            self._known[context][path] = Expansion(ids, weight, q, p, noise, int(choice))

    def _gumbel(self, context: int, position: int) -> NDArray[np.float32]:
        """float32[V]: the shared noise of one position, counted from the context's end."""
        found = self._noise.get((context, position))
        if found is None:
            key = [self.seed, 103, int(self.temperature * 1000), self.first_context + context, position]
            found = np.random.default_rng(key).gumbel(size=self.vocab).astype(np.float32)
            self._noise[context, position] = found
        return found


def _alike(work: list[Work], most_rows: int) -> Iterator[list[Work]]:
    """Groups for one forward each. Contexts are padded to the longest of a group, so long ones go with long ones."""
    group: list[Work] = []
    for one in sorted(work, key=lambda one: -len(one.lineage)):
        width = len(group[0].lineage) if group else 0
        uneven = width > 4 and len(one.lineage) * 2 < width
        if group and (uneven or (len(group) + 1) * width > most_rows):
            yield group
            group = []
        group.append(one)
    if group:
        yield group
