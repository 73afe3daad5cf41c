"""From laws to rows: what is declared and what is matched do not pay for one another, and neither changes the other's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.drafter.test_grower import opening

import rootward.engine.grower as module
from rootward.core.growth import BestFirst
from rootward.core.requests import DraftMode
from rootward.core.rng import Key, target_gumbel
from rootward.engine.atoms import Atoms, atoms_of
from rootward.engine.grower import Grower, coupled_rows
from rootward.engine.tabular import TabularModel
from rootward.ports import Reduction

V = 300


@pytest.mark.parametrize("num_atoms", [3, 32, 500])
def test_a_matched_row_holds_what_the_noise_favours_among_all_atoms(num_atoms: int) -> None:
    law = np.random.default_rng(1).dirichlet(np.full(V, 0.3), size=4)
    law[:, 50:60] = 0.0
    law[3] = 0.0
    law[3, [7, 5]] = 0.75, 0.25
    at = [(Key(1), 5), (Key(1), 6), (Key(2, 3), 5), (Key(4), 1000)]
    found = coupled_rows(np.tile(np.arange(V), (4, 1)), law, at, [num_atoms] * 4)
    for probs, (key, position), (row, noise) in zip(law, at, found, strict=True):
        whole = target_gumbel(key, position, V)
        with np.errstate(divide="ignore"):
            order = np.argsort(-(np.log(probs) + whole), kind="stable")
        best = [token for token in order[:num_atoms].tolist() if probs[token] > 0]
        assert sorted(row.ids.tolist()) == sorted(best)
        assert noise.tolist() == whole[row.ids].tolist()
        assert (np.diff(row.weight) <= 0).all()
        largest = probs[row.ids].max()
        assert row.weight.tolist() == np.clip(np.rint(probs[row.ids] / largest * 65535), 1, None).tolist()


def rows_of_ratio_trees(*, beside: bool) -> list[object]:
    grower: Grower[int] = Grower(
        TabularModel(V, seed=3, max_slots=4), incarnation=1, best_first=BestFirst(draws_per_level=2)
    )
    grower.open(1, opening(1, num_atoms=8, node_cap=6))
    grower.open(2, opening(2, num_atoms=5, node_cap=6, law=DraftMode.TOP_K))
    if beside:
        grower.open(3, opening(3, num_atoms=64, node_cap=6, law=DraftMode.COUPLED))
    while not grower.idle:
        grower.level()
    rows = [grower.trees[key].growth.own.rows for key in (1, 2)]
    return [{node: (row.ids.tolist(), row.weight.tolist()) for node, row in of_tree.items()} for of_tree in rows]


def test_matched_rounds_do_not_change_rounds_with_declared_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Atoms] = []

    def counted(*given: Any) -> tuple[Atoms, Reduction]:
        kind, reduction = atoms_of(*given)
        asked.append(kind)
        return kind, reduction

    monkeypatch.setattr(module, "atoms_of", counted)
    alone, beside = rows_of_ratio_trees(beside=False), rows_of_ratio_trees(beside=True)
    assert {(kind.num_atoms, kind.num_likely) for kind in asked} == {(8, 0), (0, V)}
    assert alone[1].keys() == beside[1].keys()
    assert {node: alone[1][node] for node in alone[1]} == beside[1]
    root = min(alone[0])
    assert alone[0][root] == beside[0][root]
    assert all(len(ids) <= 8 for ids, _ in beside[0].values())
    assert all(len(ids) <= 5 for ids, _ in beside[1].values())
