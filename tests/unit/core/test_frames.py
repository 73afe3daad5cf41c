"""The hash by which verifier and drafter know that they speak of the same text."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootward.core.frames import extend_hash, prefix_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, TOKENS, st.integers(0, 2**64 - 1))
def test_a_prefix_may_be_hashed_at_once_in_pieces_or_token_by_token(
    some: list[int], more: list[int], value: int
) -> None:
    assert prefix_hash(some, value) == reduce(extend_hash, some, value)
    assert prefix_hash([*some, *more], value) == prefix_hash(more, prefix_hash(some, value))


@pytest.mark.parametrize("num", [4095, 4096, 4097, 10_000])
def test_long_prefixes_are_hashed_in_chunks(num: int) -> None:
    tokens = tuple(i * i % 50_021 for i in range(num))
    assert prefix_hash(tokens) == reduce(extend_hash, tokens, 0)


def test_what_differs_in_one_token_one_place_or_the_order_has_another_hash() -> None:
    text = tuple(i % 7 for i in range(300))
    others = {(*text[:i], 9, *text[i + 1 :]) for i in range(300)} | {text[:i] for i in range(300)}
    others |= {(*text[:i], text[i + 1], text[i], *text[i + 2 :]) for i in range(298)}
    assert len({prefix_hash(other) for other in (text, *others)}) == len({text, *others})
