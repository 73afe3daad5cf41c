"""What nodes are worth: from verdicts, starting from a hope."""

from __future__ import annotations

from itertools import pairwise

import pytest

from verifier_service.worth import Worth


def test_before_any_round_there_is_hope_and_it_fades_from_node_to_node() -> None:
    tokens = Worth().tokens(16)
    steps = [b - a for a, b in pairwise(tokens)]
    assert tokens[0] == 1.0
    assert steps == sorted(steps, reverse=True)
    assert 0 < steps[-1] < steps[0] < 1


def test_rounds_count_for_every_smaller_cap_and_for_no_larger_one() -> None:
    worth, before = Worth(), Worth().tokens(8)
    for k in range(3000):
        worth.add(4, (1, 3) if k % 4 == 0 else (1,) if k % 2 == 0 else ())
    tokens = worth.tokens(8)
    assert tokens[:5] == pytest.approx([1.0, 1.5, 1.5, 1.75, 1.75], abs=0.12)
    assert [b - a for a, b in pairwise(tokens[4:])] == pytest.approx([b - a for a, b in pairwise(before[4:])])


def test_waiting_in_vain_is_worth_nothing() -> None:
    worth = Worth()
    for _ in range(300):
        worth.add(8, ())
    assert worth.tokens(8)[-1] < 1.2
