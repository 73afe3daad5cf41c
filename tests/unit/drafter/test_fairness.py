"""Rows and places are shared by verifier, tenant, session; what one does not want is not lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.growth_loop import UNFAIR, gives_up
from rootward.engine.grower import fair_shares, max_min

wants = st.lists(st.integers(0, 40), max_size=12)


@given(wants, st.integers(0, 200))
def test_max_min_is_fair_and_wastes_nothing_that_is_wanted(wanted: list[int], total: int) -> None:
    shares = max_min(wanted, total)
    assert sum(shares) <= total
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    unmet = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    if unmet:
        assert sum(shares) == total
        assert max(shares) - min(unmet) <= 1  # nobody has more than whoever went short, but for the remainder


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9)), max_size=12), st.integers(1, 60))
def test_dealing_gives_each_a_row_and_none_more_than_it_needs(trees, rows: int) -> None:
    wanted = [want for *_, want in trees]
    shares = fair_shares(wanted, [(verifier, tenant) for verifier, tenant, _ in trees], rows)
    assert all(min(want, 1) <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) <= max(rows, 0) + sum(want > 0 for want in wanted)
    if sum(wanted) <= rows:
        assert shares == wanted


def test_a_verifier_with_many_sessions_takes_no_more_than_its_half_from_one_with_few() -> None:
    owners = [("large", 0)] * 30 + [("small", 0)] * 2
    shares = fair_shares([8] * 32, owners, 64)
    assert shares[30:] == [8, 8]  # all it wants
    assert sum(shares[:30]) == 48  # and what it leaves is not lost
    shares = fair_shares([8] * 30 + [40] * 2, owners, 64)
    assert sum(shares[30:]) == 32


def test_tenants_of_one_verifier_share_alike() -> None:
    shares = fair_shares([10] * 10, [("v", "busy")] * 9 + [("v", "quiet")], 20)
    assert shares[9] == 10
    assert sum(shares[:9]) == 10


@pytest.mark.parametrize(
    ("held", "asking", "loser"),
    [
        ({"a": 8}, "b", "a"),
        ({"a": 5, "b": 3}, "b", "a"),
        ({"a": 4, "b": 3}, "b", None),  # one more, one less: nothing would be won
        ({"a": 8}, "a", None),
        ({}, "a", None),
    ],
)
def test_a_full_drafter_evicts_from_the_tenant_with_most_trees(held, asking: str, loser: str | None) -> None:
    assert gives_up(held, asking) == loser


def test_giving_up_ends_when_all_hold_alike() -> None:
    held = Counter(a=16)
    for asking in "bcbcbcbcbcabcabc":
        loser = gives_up(held, asking)
        if loser is not None:
            held[loser] -= 1
            held[asking] += 1
    assert max(held.values()) - min(held.values()) < UNFAIR
    assert sum(held.values()) == 16
