"""The automaton against a search through the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootward.core.suffix_automaton import SuffixAutomaton

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=40))


def ends(text: list[int], wanted: list[int]) -> list[int]:
    """Where a string ends in a text."""
    return [
        end for end in range(len(text)) if len(wanted) <= end + 1 and text[end + 1 - len(wanted) : end + 1] == wanted
    ]


def longest_repeated_suffix(text: list[int]) -> list[int]:
    for size in range(len(text) - 1, 0, -1):
        if len(ends(text, text[-size:])) > 1:
            return text[-size:]
    return []


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_repeated_suffix_and_what_followed_it_are_those_of_a_search(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    suffix = longest_repeated_suffix(text)
    state = automaton.repeated_suffix
    assert automaton.length(state) == len(suffix)
    if suffix:
        found = {token: sorted(automaton.ends(after, 100)) for token, after in automaton.followers(state, 100)}
        wanted = {token: ends(text, [*suffix, token]) for token in range(5)}
        assert found == {token: places for token, places in wanted.items() if places}
        assert found  # it has ended earlier, so something followed


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_walking_another_text_gives_the_longest_suffix_that_occurs(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    state, length = 0, 0
    for i, token in enumerate(other):
        state, length = automaton.step(state, length, token)
        known = [size for size in range(i + 2) if size == 0 or ends(text, other[i + 1 - size : i + 1])]
        assert length == max(known)
        if length:
            assert sorted(automaton.ends(state, 100)) == ends(text, other[i + 1 - length : i + 1])


@settings(max_examples=200, deadline=None)
@given(texts)
def test_links_are_the_shorter_contexts(text: list[int]) -> None:
    """Along the links the contexts get shorter and end at more places."""
    automaton = SuffixAutomaton(text)
    state = automaton.repeated_suffix
    while state > 0:
        above = automaton.link(state)
        size, shorter = automaton.length(state), automaton.length(above)
        assert shorter < size
        places = ends(text, text[len(text) - size :])
        assert ends(text, text[len(text) - shorter - 1 :]) == places  # one class
        assert not shorter or len(ends(text, text[len(text) - shorter :])) > len(places)
        state = above


def test_ends_are_limited_and_the_latest_come_first() -> None:
    automaton = SuffixAutomaton([7] * 1000)
    state, _ = automaton.step(0, 0, 7)
    assert len(automaton.ends(state, 10)) == 10
    assert sorted(automaton.ends(state, 2000)) == list(range(1000))


@pytest.mark.parametrize(
    "text",
    [[0] * 3000, [0, 1, 2] * 1000, list(range(3000)), np.random.default_rng(0).integers(0, 3, 3000).tolist()],
    ids=["one token", "period", "all different", "random"],
)
def test_appending_takes_amortised_constant_steps(text: list[int]) -> None:
    """Counted, not timed: walks along links while the text grows; and at most two states per token."""
    automaton, walked = Counting(), 0
    for token in text:
        automaton.append(token)
        walked = automaton.walked
    assert len(automaton._link) <= 2 * len(text)
    assert walked <= 4 * len(text)
    assert len(automaton) == len(text)


class Counting(SuffixAutomaton):
    """Counts how often a link is read."""

    def __init__(self) -> None:
        super().__init__()
        self._link = Counted(self._link)

    @property
    def walked(self) -> int:
        return self._link.reads


class Counted(list):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)
