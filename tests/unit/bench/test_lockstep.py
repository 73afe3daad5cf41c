"""Trees driven over all contexts are those the builders draw alone; shapes are those of `Growth`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.constructions import binary, constructions, narrow, square
from benchmarks.lockstep import generator, grow
from benchmarks.noisy import NoisyModel
from benchmarks.ranked import RankedRows
from rootward.core import drafting
from rootward.core.growth import Policy
from rootward.core.pairing import check_pair
from rootward.core.requests import DraftMode
from rootward.engine.tabular import TabularModel
from rootward.ports import Rows

TARGET = TabularModel(12, seed=3, sharpness=1.5)
DRAFT = TabularModel.perturbed(TARGET, 1.0, seed=5)
CONTEXTS = [[1, 2, 3], [4, 0], [5, 5, 5, 1]]


@pytest.fixture(scope="module")
def rows():
    with RankedRows(TARGET, DRAFT, CONTEXTS, 1.0, seed=2) as found:
        yield found
    DRAFT.check_idle()


def test_a_driven_builder_draws_the_tree_it_draws_alone(rows):
    for context, driven in enumerate(constructions()["rsd_s_w2"].trees(rows, 8)):
        alone, draft = drafting.rsd_s(lambda path, c=context: rows.at(c, path).q, 2, 4, generator(rows, context))
        assert driven.tree == alone
        np.testing.assert_array_equal(driven.draft, draft)


@pytest.mark.parametrize("name", sorted(constructions()))
@pytest.mark.parametrize("budget", [1, 5, 9])
def test_no_tree_exceeds_its_budget(rows, name, budget):
    made = constructions()[name].trees(rows, budget)
    assert len(made) == len(CONTEXTS)
    for tree, draft in made:
        assert 1 < len(tree) <= budget + 1
        assert draft.shape == (len(tree), rows.num_atoms)
        if name not in ("iid_paths", "eagle2"):
            assert len(tree) == budget + 1


@pytest.mark.parametrize(("family", "law"), [(0, DraftMode.SAMPLED), (2, DraftMode.GREEDY)])
def test_a_shape_is_what_growth_grows(rows, family, law):
    policy = shapes.policy_of(law, 10, 0.6, family)
    for one in grow(rows, policy, 10):
        assert tuple(one.drafted.tree.parent) == shapes.best_first(10, 0.6, family)


def test_growth_declares_the_row_of_every_family(rows):
    for law in (DraftMode.SAMPLED, DraftMode.GREEDY):
        for one in grow(rows, Policy(law, 8, 4, 4, 3, 0.7, family=(0.4, 0.3)), 3):
            tree, draft = one.drafted
            inner = np.unique(tree.parent[1:])
            np.testing.assert_allclose(draft[inner].sum(axis=1), 1.0)
            assert one.after_level == sorted(one.after_level)


def test_shapes_hold_their_budgets():
    for budget in range(1, 70):
        assert 2 ** len(binary(budget)) - 2 < budget <= 2 ** (len(binary(budget)) + 1) - 2
        assert narrow(budget)[0] * len(narrow(budget)) >= budget
        assert np.prod(square(budget)) >= budget


def test_noise_is_a_function_of_the_text_alone():
    noisy = NoisyModel(TabularModel(12, seed=3), 1.0, seed=4)
    plain = TabularModel(12, seed=3).log_law([2, 7])
    slot = noisy.open()
    chained = noisy.forward([Rows.chain(slot, 0, [2, 7])])[1]
    noisy.commit(slot, 0, keep_below=False)
    stepped = noisy.forward([Rows.chain(slot, 5, [7])])[0]
    np.testing.assert_array_equal(chained, stepped)
    assert 0.3 < np.std(chained.numpy() - plain) < 3.0
    noisy.release(slot)
    assert not np.array_equal(noisy.forward([Rows.chain(slot, 5, [8])])[0], stepped)
    noisy.close(slot)


ROW_OF_THE_TABLE = {  # of `core.pairing`, by the beginning of a construction's name
    "chain_chosen": "top_k",
    "chain": "chain",
    "rsd_c": "rsd_c",
    "rsd_s": "rsd_s",
    "iid_paths": "iid_paths",
    "iid_copies": "iid",
    "delayed": "delayed",
    "greedy": "greedy",
    "best_first_greedy": "greedy",
    "calibrated_greedy": "greedy",
    "best_first": "best_first_drawn",
    "calibrated": "fixed_shape",
    "top_k": "top_k",
    "eagle2": "eagle2",
    "coupled": "coupled",
}


@pytest.mark.parametrize("name", sorted(constructions()))
def test_every_rule_is_lossless_for_its_construction(name):
    construction = constructions()[name]
    row = next(row for start, row in ROW_OF_THE_TABLE.items() if name.startswith(start))
    for rule in construction.rules:
        replacement = construction.replacement and rule != "match"
        check_pair(row, "match" if rule == "coupled" else rule, replacement=replacement)
