"""From the laws of a level to the rows that its trees grow from, all nodes of one kind at once.

A row that ratio tests will look at is declared: its K atoms are those on which both sides agree, so they are ranked with care. What grows
under shared noise is only matched. Its row does not travel and needs no order, but many more atoms before the noise speaks, for the
target's own token is often an unlikely one.

Legend: T nodes, V vocabulary, A atoms that the noise chooses among, K atoms kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from drafter_service.growing_tree import GrowingTree
from rootward.core.ahead import shared_order
from rootward.core.arrays import Floats
from rootward.core.requests import Law, Sampling
from rootward.core.rng import BonusKey, Key, target_gumbel_batch
from rootward.core.rows import Row, integer_weights, quantise_top, rows_of
from rootward.engine.processors import penalised
from rootward.engine.sampling import likely_atoms, processed, top_atoms

MATCH_ATOMS = 1024  # of a row, among which the noise of the target chooses
GUESS_ATOMS = 2048  # of a row, among which the bonus token is guessed
GREEDY_TEMPERATURE = 0.5  # what chosen trees rank by when the target decodes greedily: better than 1 (measured)

Owners = Sequence[tuple[GrowingTree, int]]  # the node that each row of a level belongs to


def expand(owners: Owners, logits_TV: torch.Tensor) -> None:
    """The rows of these nodes are known."""
    probs_TV = processed(_with_penalties(owners, logits_TV), [_processors(growing) for growing, _ in owners])
    for of_kind, concerns in (
        (_expand_declared, lambda growing, node: growing.open.law is not Law.COUPLED),
        (_expand_matched, lambda growing, node: growing.open.law is Law.COUPLED),
        (_order_guesses, GrowingTree.guesses_at),
    ):
        rows = [i for i, owner in enumerate(owners) if concerns(*owner)]
        if rows:
            of_kind([owners[i] for i in rows], probs_TV if len(rows) == len(owners) else probs_TV[rows])


def declared_rows(probs_TV: torch.Tensor, num_atoms: Sequence[int]) -> list[Row]:
    """The largest atoms of each law, as many as its tree declares, rounded to integers."""
    return rows_of(*quantise_top(*top_atoms(probs_TV, max(num_atoms))), num_atoms)


def matched_rows(
    probs_TV: torch.Tensor, at: Sequence[tuple[Key, int]], num_atoms: Sequence[int]
) -> list[tuple[Row, Floats]]:
    """The atoms that the noise at (key, position) of a node favours, and that noise."""
    ids_TA, probs_TA = likely_atoms(probs_TV, MATCH_ATOMS)
    noise_TA = target_gumbel_batch(at, ids_TA)
    with np.errstate(divide="ignore"):
        perturbed_TA = np.log(probs_TA) + noise_TA
    found: list[tuple[Row, Floats]] = []
    for ids, probs, noise, perturbed, most in zip(ids_TA, probs_TA, noise_TA, perturbed_TA, num_atoms, strict=True):
        best = np.argpartition(-perturbed, most - 1)[:most] if most < len(ids) else np.arange(len(ids))
        best = best[probs[best] > 0.0]
        weight = integer_weights(probs[None, best])[0]
        order = np.lexsort((ids[best], -weight))
        (row,) = rows_of(ids[None, best[order]], weight[None, order], [most])
        found.append((row, noise[best[order]]))
    return found


def _processors(growing: GrowingTree) -> Sampling:
    wanted = growing.open.sampling
    if not wanted.greedy:
        return wanted
    return replace(wanted, temperature=GREEDY_TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)


def _expand_declared(owners: Owners, probs_TV: torch.Tensor) -> None:
    rows = declared_rows(probs_TV, [growing.open.num_atoms for growing, _ in owners])
    for (growing, node), row in zip(owners, rows, strict=True):
        growing.growth.expand(node, row)


def _expand_matched(owners: Owners, probs_TV: torch.Tensor) -> None:
    at = [(growing.key, growing.tree.at(node).depth) for growing, node in owners]
    rows = matched_rows(probs_TV, at, [growing.open.num_atoms for growing, _ in owners])
    for (growing, node), (row, noise) in zip(owners, rows, strict=True):
        growing.growth.expand(node, row, noise)


def _order_guesses(owners: Owners, probs_TV: torch.Tensor) -> None:
    """What the noise of the bonus token makes of each row."""
    ids_TA, law_TA = likely_atoms(probs_TV, GUESS_ATOMS)
    for (growing, node), ids, law in zip(owners, ids_TA, law_TA, strict=True):
        assert growing.open.bonus_key is not None
        key, epoch, length = BonusKey(growing.open.bonus_key), growing.open.epoch, growing.tree.at(node).depth
        growing.orders[node] = shared_order(key, epoch, length, ids[law > 0], law[law > 0])


def _with_penalties(owners: Owners, logits_TV: torch.Tensor) -> torch.Tensor:
    """The target's penalties, each row under its own node's text."""
    rows_of: dict[int, list[int]] = {}
    for row, (growing, _) in enumerate(owners):
        if growing.history is not None:
            rows_of.setdefault(growing.kv_slot, []).append(row)
    if rows_of:
        logits_TV = logits_TV.clone()
    for rows in rows_of.values():
        growing = owners[rows[0]][0]
        assert growing.history is not None
        paths = [growing.path(owners[row][1]) for row in rows]
        logits_TV[rows] = penalised(logits_TV[rows], growing.open.sampling, growing.history, paths).to(logits_TV)
    return logits_TV
