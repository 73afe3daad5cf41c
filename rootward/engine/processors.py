"""Logit processors that run before the temperature: masks, bias and penalties, each row under its own node's text.

A node's text is the committed text and its path. Processors run in the order of vLLM (docs/parameters.md): structure of the output, allowed
tokens, bad words, min_tokens, bias, repetition, frequency and presence penalty; then, in `sampling`, temperature, min-p, top-k, top-p.

Cost per round: O(nodes × distinct tokens of the text and the tree) for penalties, O(nodes × V) tensor work for masks.

Legend: T rows of the batch, N nodes of one tree, D distinct tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.arrays import Bools, Ints
from rootward.core.requests import Sampling
from rootward.core.tree import TokenTree
from rootward.engine.grammar import TreeMatcher

# Logits that are -inf become this before a mask: if a mask leaves only such tokens, they are equally likely and the row is not empty.
NEVER = -1e30


# (tokens int64[D], counts in the output of each of N texts int64[N, D], whether they are in prompt or output bool[N, D])
Counted = tuple[Ints, Ints, Bools]


class History:
    """The distinct tokens of a text and their counts in its output, updated token by token."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self._column: dict[int, int] = {}
        self._ids = np.empty(16, dtype=np.int64)
        self._counts = np.zeros(16, dtype=np.int64)
        for token in prompt:
            self._note(token)
        self.extend(output)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of output."""
        for token in tokens:
            column = self._note(token)  # may move the counts
            self._counts[column] += 1

    def below(self, tree: TokenTree) -> Counted:
        """Counts in the text of each node of a tree."""
        node, above = np.nonzero(tree.ancestors[:, 1:])
        return self._counted(len(tree), node, tree.token[1:].tolist(), above)

    def after(self, paths: Sequence[Sequence[int]]) -> Counted:
        """Counts in the text continued by each of these paths."""
        tokens = [token for path in paths for token in path]
        node = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
        return self._counted(len(paths), node, tokens, np.arange(len(tokens)))

    def _counted(self, num_nodes: int, node: Ints, tokens: Sequence[int], at: Ints) -> Counted:
        """Counts for nodes with tokens on their paths: tokens[at[i]] is on the path of node[i]."""
        known = len(self._column)
        new = {t: known + i for i, t in enumerate(dict.fromkeys(t for t in tokens if t not in self._column))}
        column = np.array([self._column.get(t, new.get(t, 0)) for t in tokens], dtype=np.int64)
        counts = np.zeros((num_nodes, known + len(new)), dtype=np.int64)
        counts[:, :known] = self._counts[:known]
        np.add.at(counts, (node, column[at]), 1)
        present = counts > 0
        present[:, :known] = True
        return np.concatenate([self._ids[:known], np.fromiter(new, np.int64, len(new))]), counts, present

    def _note(self, token: int) -> int:
        column = self._column.setdefault(int(token), len(self._column))
        if column == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[column] = token
        return column


@dataclass(frozen=True, slots=True)
class Prefix:
    """State of processors at the end of the committed text."""

    history: History | None = None  # for penalties
    num_before_stop: int = 0  # min_tokens: tokens that must come before one of `stop_ids` is allowed
    stop_ids: tuple[int, ...] = ()
    matcher: TreeMatcher | None = None
    output: Sequence[int] = ()  # last tokens of the output, as many as the longest bad sequence needs


Part = tuple[Sampling, Prefix, TokenTree]


@torch.inference_mode()
def adjusted(logits_TV: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """Scores [T, V] of the rows of several trees, one tree after another: the logits themselves if nothing changes, else a copy."""
    if not any(_changes(sampling, prefix) for sampling, prefix, _ in parts):
        return logits_TV
    scores = _own_copy(logits_TV)
    at = 0
    for sampling, prefix, tree in parts:
        rows_NV = scores[at : at + len(tree)]
        at += len(tree)
        if _masked(sampling, prefix):
            rows_NV.clamp_(min=NEVER)  # once, before all masks: later it would give back what one of them has taken
        if prefix.matcher is not None:
            rows_NV.masked_fill_(~_unpacked(prefix.matcher.masks(tree), rows_NV), -torch.inf)
        if sampling.allowed_token_ids:
            _allow(rows_NV, sampling)
        if sampling.bad_sequences:
            _ban(rows_NV, sampling, prefix, tree)
        if prefix.num_before_stop and prefix.stop_ids:
            _hold_back(rows_NV, prefix, tree)
        if sampling.logit_bias:
            _bias(rows_NV, sampling)
        if sampling.penalised:
            assert prefix.history is not None
            _penalise(rows_NV, sampling, prefix.history.below(tree))
    return scores


@torch.inference_mode()
def penalised(
    logits_NV: torch.Tensor, sampling: Sampling, history: History, paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Scores [N, V] of rows that follow the text and these paths, after the penalties. A drafter processes rows, not whole trees."""
    scores = _own_copy(logits_NV)
    _penalise(scores, sampling, history.after(paths))
    return scores


@torch.inference_mode()
def shifted(logits_TV: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Scores [T, V] after the processors that do not depend on the text: allowed tokens and bias."""
    rows_of: dict[int, list[int]] = {}  # rows of one tree share one object
    for row, s in enumerate(sampling):
        if s.shifted:
            rows_of.setdefault(id(s), []).append(row)
    if not rows_of:
        return logits_TV
    scores = _own_copy(logits_TV)
    for rows in rows_of.values():
        s = sampling[rows[0]]
        index = _on_device_of(rows, scores)
        some = scores.index_select(0, index)
        if s.allowed_token_ids:
            _allow(some, s)
        if s.logit_bias:
            _bias(some, s)
        scores.index_copy_(0, index, some)
    return scores


def _changes(sampling: Sampling, prefix: Prefix) -> bool:
    return _masked(sampling, prefix) or sampling.shifted or sampling.penalised


def _masked(sampling: Sampling, prefix: Prefix) -> bool:
    """Has masks that depend on the text."""
    held_back = bool(prefix.num_before_stop and prefix.stop_ids)
    return held_back or bool(sampling.bad_sequences) or prefix.matcher is not None


def _own_copy(logits_TV: torch.Tensor) -> torch.Tensor:
    """A copy in float32, or float64 if the logits are."""
    return logits_TV.clone() if logits_TV.dtype in (torch.float32, torch.float64) else logits_TV.float()


def _allow(rows_NV: torch.Tensor, sampling: Sampling) -> None:
    ids = _on_device_of(sampling.allowed_token_ids, rows_NV)
    kept = rows_NV.index_select(1, ids).clamp(min=NEVER)
    rows_NV.fill_(-torch.inf).index_copy_(1, ids, kept)


def _ban(rows_NV: torch.Tensor, sampling: Sampling, prefix: Prefix, tree: TokenTree) -> None:
    """The last token of a bad sequence has no probability where the output ends with all tokens before it."""
    tail_NL = _tails(prefix.output, tree, max(map(len, sampling.bad_sequences)) - 1)
    for *before, last in sampling.bad_sequences:
        ends = (tail_NL[:, tail_NL.shape[1] - len(before) :] == before).all(1)
        if ends.any():
            rows_NV[torch.from_numpy(np.flatnonzero(ends)).to(rows_NV.device), last] = -torch.inf


def _tails(output: Sequence[int], tree: TokenTree, length: int) -> Ints:
    """int64[N, length]: the last tokens of the output at each node, -1 before its beginning."""
    tails = np.full((len(tree), length), -1, dtype=np.int64)
    if length:
        known = list(output)[-length:]
        tails[0, length - len(known) :] = known
        for node, parent in enumerate(tree.parent.tolist()[1:], start=1):
            tails[node, :-1], tails[node, -1] = tails[parent, 1:], tree.token[node]
    return tails


def _hold_back(rows_NV: torch.Tensor, prefix: Prefix, tree: TokenTree) -> None:
    """Forbids `stop_ids` before min_tokens: the row of a node at depth d is for token d after the committed text."""
    early = torch.from_numpy(np.flatnonzero(tree.depth < prefix.num_before_stop)).to(rows_NV.device)
    ids = torch.tensor(prefix.stop_ids, device=rows_NV.device)
    rows_NV[early[:, None], ids] = -torch.inf


def _bias(rows_NV: torch.Tensor, sampling: Sampling) -> None:
    ids, bias = zip(*sampling.logit_bias, strict=True)
    at = _on_device_of(ids, rows_NV)
    rows_NV.index_copy_(1, at, rows_NV.index_select(1, at) + _on_device_of(bias, rows_NV).to(rows_NV.dtype))


def _penalise(rows_NV: torch.Tensor, sampling: Sampling, counted: Counted) -> None:
    """Scores are divided by the repetition penalty where positive, multiplied where negative; the others are subtracted."""
    tokens, *tables = counted
    ids, counts, present = (_on_device_of(table, rows_NV) for table in (tokens, *tables))
    scores = rows_NV.index_select(1, ids)
    factor = sampling.repetition_penalty
    repeated = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(present, repeated, scores)
    counts = counts.to(scores.dtype)
    scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * counts.clamp(max=1)
    rows_NV.index_copy_(1, ids, scores)


def _on_device_of(values: Sequence[float] | NDArray[Any], rows_NV: torch.Tensor) -> torch.Tensor:
    """Values as a tensor on the device of the rows, without a synchronisation."""
    return torch.from_numpy(np.asarray(values)).to(rows_NV.device, non_blocking=True)


def _unpacked(bits: NDArray[np.uint8], rows_NV: torch.Tensor) -> torch.Tensor:
    """bool[N, V] of packed bits, unpacked on the device of the rows."""
    packed = torch.from_numpy(bits).to(rows_NV.device)
    places = torch.arange(8, dtype=torch.uint8, device=rows_NV.device)
    return (packed[:, :, None] >> places & 1).flatten(1)[:, : rows_NV.shape[1]].bool()
