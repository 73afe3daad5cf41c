"""What nodes are worth: from verdicts, starting from a hope."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from verifier_service.worth import Worth


def test_before_any_round_there_is_hope_and_it_fades_from_node_to_node() -> None:
    tokens = Worth().tokens(16)
    steps = [b - a for a, b in pairwise(tokens)]
    assert tokens[0] == 1.0
    assert steps == sorted(steps, reverse=True)
    assert 0 < steps[-1] < steps[0] < 1


def test_rounds_count_for_every_smaller_cap() -> None:
    worth = Worth()
    for k in range(3000):
        worth.add(4, (1, 3) if k % 4 == 0 else (1,) if k % 2 == 0 else ())
    assert worth.tokens(4) == pytest.approx([1.0, 1.5, 1.5, 1.75, 1.75], abs=0.12)


@pytest.mark.parametrize(("share", "expected"), [(0.9, 0.9), (0.8, 0.8), (0.3, 0.72)])
def test_nodes_that_no_round_had_are_expected_to_fall_off_as_those_before_or_slower(
    share: float, expected: float
) -> None:
    worth, rng = Worth(), random.Random(1)
    for _ in range(3000):
        length = next((i for i in range(4) if rng.random() > share), 4)
        worth.add(4, range(1, length + 1))
    steps = [b - a for a, b in pairwise(worth.tokens(12))]
    assert steps[:4] == pytest.approx([share, share**2, share**3, share**4], abs=0.08)
    assert [b / a for a, b in pairwise(steps[3:])] == pytest.approx([expected] * 8, rel=0.05)


def test_waiting_in_vain_is_worth_nothing() -> None:
    worth = Worth()
    for _ in range(300):
        worth.add(8, ())
    assert worth.tokens(8)[-1] < 1.2


def test_of_a_wide_tree_the_better_nodes_say_what_a_smaller_one_is_worth() -> None:
    """Two nodes a level, the second of them a sibling that is seldom needed: with half as many nodes the siblings would not be drawn."""
    worth = Worth()
    for k in range(3000):
        worth.add(6, (1, 3, 5)[: k % 4])
    assert worth.tokens(3)[-1] == pytest.approx(1 + 0.75 + 0.5, abs=0.12)
    assert worth.tokens_of_trees(3)[-1] == pytest.approx(1 + 0.75 + 0.5 + 0.25, abs=0.12)
    assert worth.tokens_of_trees(6)[-1] == pytest.approx(worth.tokens(6)[-1])


def test_late_nodes_are_never_expected_to_be_worth_more_than_those_before() -> None:
    worth = Worth()
    for _ in range(300):
        worth.add(2, (2,))
    steps = [b - a for a, b in pairwise(worth.tokens(16))]
    assert steps[1:] == sorted(steps[1:], reverse=True)
