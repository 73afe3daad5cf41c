"""From a forward to the rows that trees grow from, all nodes of one kind at once.

A row that ratio tests will look at is declared: its K atoms are those on which both sides agree, so they are ranked with care. What grows
under shared noise is only matched. Its row does not travel and needs no order, but many more atoms before the noise speaks, for the
target's own token is often an unlikely one. The same goes for guesses of a bonus token, and any node may be one where a round stops:
of this tree, or of what hangs below a guess that turns out right.

A level whose nodes are all of one kind is reduced to atoms in the forward itself; whichever way, the host waits once.

Legend: T nodes, V vocabulary, A atoms that the noise chooses among, K atoms kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from drafter_service.growing_tree import GrowingTree, Guesses
from rootward.core.arrays import Floats, Ints
from rootward.core.distribution import DraftDistribution, integer_weights, rows_of
from rootward.core.requests import DraftMode, Sampling
from rootward.core.rng import Key, target_gumbel_batch
from rootward.engine.atoms import Atoms, Found, atoms_of, fetched, likely_tokens, reduced
from rootward.engine.processors import penalised, shifted
from rootward.ports import LanguageModel, Reduction, Rows

MATCH_ATOMS = 1024  # of a row, among which the noise of the target chooses
GUESS_ATOMS = 2048  # of a row, among which the bonus token is guessed
GREEDY_TEMPERATURE = 0.5  # what chosen trees rank by when the target decodes greedily: better than 1 (measured)


class Asked(NamedTuple):
    """A node that waits for a row of a forward."""

    row: int
    growing: GrowingTree
    node: int

    @property
    def matched(self) -> bool:
        return self.growing.open.law is DraftMode.COUPLED

    @property
    def num_likely(self) -> int:
        """Atoms for the noise to choose among."""
        return MATCH_ATOMS if self.matched else GUESS_ATOMS if self.growing.shares_bonus else 0


@torch.inference_mode()
def launch(
    model: LanguageModel, batch: Sequence[Rows], num_logits: Sequence[int], asked: Sequence[Asked]
) -> Callable[[], None]:
    """Run a forward. What comes back waits for it and expands the nodes."""
    kinds: dict[tuple[bool, int], list[Asked]] = {}
    for one in asked:
        kinds.setdefault((one.matched, one.num_likely), []).append(one)
    groups = list(kinds.values())
    wanted = [_wanted(group, model.info.vocab_size) for group in groups]
    if len(groups) == 1 and len(asked) == sum(num_logits) and not any(_is_edited(one.growing) for one in asked):
        parts = [model.forward(batch, num_logits=num_logits, reduction=wanted[0][1])]
    else:
        logits_TV = model.forward(batch, num_logits=num_logits)
        parts = [
            reduced(_edited(group, logits_TV), reduction) for group, (_, reduction) in zip(groups, wanted, strict=True)
        ]

    def expand() -> None:
        tables = fetched(parts)
        for group, (kind, _), table in zip(groups, wanted, tables, strict=True):
            _expand(group, kind.read(table))

    return expand


def _wanted(group: Sequence[Asked], vocab: int) -> tuple[Atoms, Reduction]:
    """What is to be known of rows of one kind."""
    num_atoms = 0 if group[0].matched else max(one.growing.open.num_atoms for one in group)
    return atoms_of([one.growing.ranking for one in group], vocab, num_atoms, group[0].num_likely)


def _expand(group: Sequence[Asked], found: Found) -> None:
    if group[0].matched:
        _expand_matched(group, found)
        return
    rows = rows_of(found.ids, found.weight, [one.growing.open.num_atoms for one in group])
    for one, row in zip(group, rows, strict=True):
        one.growing.growth.expand(one.node, row)
    if group[0].num_likely:
        for one, likely in zip(group, found.likely, strict=True):
            one.growing.guesses[one.node] = Guesses(likely)


def matched_rows(
    ids_TA: Ints, mass_TA: Floats, at: Sequence[tuple[Key, int]], num_atoms: Sequence[int]
) -> list[tuple[DraftDistribution, Floats]]:
    """The atoms that the noise at (key, position) of a node favours, and that noise. mass: in any unit."""
    noise_TA = target_gumbel_batch(at, ids_TA)
    with np.errstate(divide="ignore"):
        perturbed_TA = np.log(mass_TA) + noise_TA
    found: list[tuple[DraftDistribution, Floats]] = []
    for ids, mass, noise, perturbed, most in zip(ids_TA, mass_TA, noise_TA, perturbed_TA, num_atoms, strict=True):
        best = np.argpartition(-perturbed, most - 1)[:most] if most < len(ids) else np.arange(len(ids))
        best = best[mass[best] > 0.0]
        weight = integer_weights(mass[None, best])[0]
        order = np.lexsort((ids[best], -weight))
        (row,) = rows_of(ids[None, best[order]], weight[None, order], [most])
        found.append((row, noise[best[order]]))
    return found


def _expand_matched(group: Sequence[Asked], found: Found) -> None:
    at = [(one.growing.key, one.growing.tree.at(one.node).depth) for one in group]
    rows = matched_rows(*likely_tokens(found.likely), at, [one.growing.open.num_atoms for one in group])
    for one, (row, noise) in zip(group, rows, strict=True):
        one.growing.growth.expand(one.node, row, noise)


def ranking(wanted: Sampling) -> Sampling:
    """By what the rows of a tree are processed."""
    if not wanted.greedy:
        return wanted
    return replace(wanted, temperature=GREEDY_TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)


def _is_edited(growing: GrowingTree) -> bool:
    return growing.history is not None or growing.ranking.shifted


def _edited(group: Sequence[Asked], logits_TV: torch.Tensor) -> torch.Tensor:
    """Their rows, after what the target adds to logits: allowed tokens, bias, penalties, each row under its own node's text."""
    if len(group) < len(logits_TV):
        logits_TV = logits_TV.index_select(0, _there([one.row for one in group], logits_TV))
    logits_TV = shifted(logits_TV, [one.growing.ranking for one in group])
    of_tree: dict[int, list[int]] = {}
    for i, one in enumerate(group):
        if one.growing.history is not None:
            of_tree.setdefault(one.growing.kv_slot, []).append(i)
    if of_tree:
        logits_TV = logits_TV.clone()
    for mine in of_tree.values():
        growing = group[mine[0]].growing
        assert growing.history is not None
        paths = [growing.path(group[i].node) for i in mine]
        rows = _there(mine, logits_TV)
        some = penalised(logits_TV.index_select(0, rows), growing.open.sampling, growing.history, paths)
        logits_TV.index_copy_(0, rows, some.to(logits_TV.dtype))
    return logits_TV


def _there(rows: list[int], logits_TV: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(rows)).to(logits_TV.device, non_blocking=True)
