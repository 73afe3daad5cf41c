"""How much a level draws."""

from __future__ import annotations

import pytest

from rootward.core.growth import Policy
from rootward.core.requests import DraftMode


@pytest.mark.parametrize(("cap", "draws"), [(1, 1), (5, 1), (7, 1), (8, 2), (12, 3), (16, 4), (64, 4)])
def test_a_small_tree_has_at_least_so_many_levels_as_it_should(cap: int, draws: int) -> None:
    policy = Policy(DraftMode.SAMPLED, node_cap=cap, draws_per_level=4, least_levels=4)
    assert policy.draws == draws
    assert cap < 4 or -(-cap // policy.draws) >= 4
