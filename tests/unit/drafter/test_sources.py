"""Sources: what they name, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tokens import RandomTokens

from rootward.core.lookup import (
    Merged,
    Ngram,
    Prediction,
    Recycling,
    Source,
    Successors,
    parse_recipe,
)
from rootward.core.requests import DraftMode

TEXTS = st.lists(st.integers(0, 4), max_size=60)


def named(source: Source, *path: int) -> list[int]:
    """The candidates after the text and a path."""
    state = source.start()
    for token in path:
        state = source.step(state, token)
    return [candidate.token for candidate in source.candidates(state)]


def fed(source: Source, *texts) -> Source:
    for text in texts:
        source.extend(list(text))
    return source


def sources() -> dict[str, Source]:
    return {
        "ngram": Ngram(),
        "recycling": Recycling(Successors()),
        "prediction": Prediction([1, 2, 3, 0, 4, 1, 2]),
        "random": RandomTokens(5, seed=3),
        "merged": Merged([Ngram(), Prediction([3, 4, 3, 1]), RandomTokens(5)]),
    }


@pytest.mark.parametrize("name", sources())
@settings(max_examples=50, deadline=None)
@given(text=TEXTS, path=st.lists(st.integers(0, 4), max_size=6))
def test_candidates_are_distinct_best_first_and_a_function_of_the_text(name: str, text, path) -> None:
    whole, pieces = fed(sources()[name], text), fed(sources()[name], text[:7], text[7:])
    states = [whole.start(), pieces.start()]
    for token in [None, *path]:
        if token is not None:
            states = [source.step(state, token) for source, state in zip((whole, pieces), states, strict=True)]
        candidates = whole.candidates(states[0])
        assert candidates == pieces.candidates(states[1])
        assert len({c.token for c in candidates}) == len(candidates)
        assert all(0 < c.score < 1 for c in candidates)
        assert [c.score for c in candidates] == sorted((c.score for c in candidates), reverse=True)
        assert all(0 <= c.token < 5 for c in candidates)


@pytest.mark.parametrize("name", ["prediction", "random"])
@given(text=TEXTS, path=st.lists(st.integers(0, 4), max_size=6))
def test_a_path_is_followed_as_the_text_is(name: str, text, path) -> None:
    """Sources that do not learn: committing a path leads where walking it does."""
    assert named(fed(sources()[name], text), *path) == named(fed(sources()[name], text, path))


def test_random_tokens_are_a_function_of_seed_and_text() -> None:
    trees = {(seed, text): tuple(named(fed(RandomTokens(1000, seed), text))) for seed in (1, 2) for text in ((), (3,))}
    assert len(set(trees.values())) == 4
    assert all(0 <= token < 1000 for tree in trees.values() for token in tree)


# -- n-gram -----------------------------------------------------------------------------------------------------------


def test_continuations_are_ordered_by_frequency_then_recency() -> None:
    source = fed(Ngram(), [1, 2, 7, 1, 2, 8, 1, 2, 7, 1, 2, 9, 1, 2])
    assert named(source) == [7, 9, 8]  # twice; then once each, the later one first
    assert named(fed(Ngram(), [2, 1, 7, 3, 1, 8, 4, 1, 8, 5, 1, 7, 6, 1])) == [7, 8]  # twice each, 7 last


@pytest.mark.parametrize(
    ("before", "scores"),
    [
        ((5, 1, 2), {7: 3 / 4}),
        ((0, 1, 2), {7: 2 / 3 * 1 / 2, 8: 2 / 3 * 1 / 2}),
        ((0, 2), {7: 1 / 6, 8: 1 / 6, 4: 1 / 6}),
    ],
)
def test_scores_are_those_of_partial_matching_for_the_longest_context(before, scores) -> None:
    """After 5 1 2: 7, once. After 1 2: 7 and 8. After 2: 7, 8 and 4."""
    source = fed(Ngram(), [5, 1, 2, 7, 6, 1, 2, 8, 2, 4, *before])
    assert {token: score for token, score in source.candidates(source.start())} == pytest.approx(scores)


def test_a_period_is_continued_beyond_the_end_of_the_text() -> None:
    source = fed(Ngram(), [1, 2, 3] * 3)
    assert [named(source, *([1, 2, 3] * 4)[:depth])[0] for depth in range(12)] == [1, 2, 3] * 4


def test_longer_matches_are_trusted_more() -> None:
    first = [fed(Ngram(), [*range(size), 99, *range(size)]) for size in (1, 3, 9)]
    scores = [source.candidates(source.start())[0].score for source in first]
    assert scores == pytest.approx([1 / 2, 3 / 4, 9 / 10])


def test_new_text_has_no_continuation() -> None:
    assert named(Ngram()) == []
    assert named(fed(Ngram(), [1, 2, 3])) == []
    assert named(fed(Ngram(), [1, 2, 1]), 3) == []  # nothing is known after 3, which has not been said


# -- recycling --------------------------------------------------------------------------------------------------------


def test_the_last_different_successors_newest_first() -> None:
    text = [token for successor in (1, 2, 3, 4, 5, 6, 7, 8, 1, 9) for token in (0, successor)]
    source = fed(Recycling(Successors()), [*text, 0])
    assert named(source) == [9, 1, 8, 7, 6, 5, 4, 3]
    assert named(source, 9) == [0]


def test_texts_share_a_memory() -> None:
    shared = Successors()
    fed(Recycling(shared), [1, 2, 3])
    assert named(fed(Recycling(shared), [1])) == [2]
    assert len(shared) == 2


# -- prediction -------------------------------------------------------------------------------------------------------

PREDICTED = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def follow(source: Prediction, length: int) -> list[int]:
    path: list[int] = []
    for _ in range(length):
        path.append(named(source, *path)[0])
    return path


def test_a_prediction_is_followed_from_its_beginning() -> None:
    source = fed(Prediction(PREDICTED, prefix=2), [1, 2])
    assert follow(source, 10) == PREDICTED
    assert named(source, *PREDICTED) == []
    assert follow(fed(source, [10, 11, 12]), 4) == [13, 14, 15, 16]


def test_trust_grows_with_what_has_agreed() -> None:
    source = Prediction(PREDICTED)
    scores = []
    for token in PREDICTED[:5]:
        scores.append(source.candidates(source.start())[0].score)
        source.extend([token])
    assert scores == sorted(scores)
    assert scores[0] < scores[-1]


@pytest.mark.parametrize(
    ("output", "ahead"),
    [
        ([10, 11, 99], [13, 14]),  # replaced
        ([10, 11, 99, 12], [13, 14]),  # inserted: the second guess
        ([10, 11, 14, 15], [16, 17]),  # left out
        ([10, 11, 99, 98, 97, 14, 15], [16, 17]),  # three for two
        ([16, 17], [18, 19]),  # begins elsewhere
    ],
)
def test_after_a_difference_it_aligns_again(output: list[int], ahead: list[int]) -> None:
    assert follow(fed(Prediction(PREDICTED), output), len(ahead)) == ahead


def test_an_inserted_token_is_the_second_guess() -> None:
    assert named(fed(Prediction(PREDICTED), [10, 11, 99])) == [13, 12]


def test_a_repeated_passage_continues_at_the_nearest_later_occurrence() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5]
    source = fed(Prediction(text), [1, 2, 3, 9, 9, 1, 2])
    assert named(source)[0] == 4


def test_an_output_under_way_when_the_text_is_opened_is_found() -> None:
    source = fed(Prediction(PREDICTED, prefix=6), [1, 2, 10, 11, 12, 13])
    assert named(source)[0] == 14
    assert 10 in named(source)  # or it has not begun


def test_a_long_prediction_is_read_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at once, the longest one of each choice of a request would hold up all other texts for half a second."""
    monkeypatch.setattr("rootward.core.lookup.PREDICTION_CHUNK", 4)
    source = Prediction(PREDICTED)
    assert len(source._automaton) == 4
    assert follow(source, 10) == PREDICTED  # which needs no search
    assert [len(fed(source, [token])._automaton) for token in (10, 99, 98)] == [8, 10, 10]
    assert follow(fed(source, [16, 17]), 2) == [18, 19]


# -- merging ----------------------------------------------------------------------------------------------------------


class Fixed:
    """Names the same tokens after every text."""

    def __init__(self, **scores: float) -> None:
        self.scores = [(int(name[1:]), score) for name, score in scores.items()]

    def extend(self, tokens) -> None: ...

    def start(self) -> int:
        return 0

    def step(self, state: int, token: int) -> int:
        return 0

    def candidates(self, state: int):
        return self.scores


def test_a_union_without_repetition_best_score_first() -> None:
    both = Merged([Fixed(t1=0.5, t2=0.2), Fixed(t3=0.6, t1=0.4, t2=0.3)])
    assert both.candidates(both.start()) == [(3, 0.6), (1, 0.5), (2, 0.3)]


def test_one_source_follows_what_another_has_named() -> None:
    """3 is known to the memory only; what comes after it is named by n-gram, which has seen it elsewhere."""
    memory = Successors()
    memory.see(2, 3)
    source = fed(Merged([Ngram(), Recycling(memory)]), [3, 8, 1, 2])
    assert named(source) == [3]
    assert named(source, 3)[0] == 8


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_recipes_by_name() -> None:
    for spec, kind in {"ngram:": Ngram, "recycling:": Recycling, "ngram+recycling:": Merged}.items():
        recipe = parse_recipe(spec)
        assert recipe is not None
        assert type(recipe.source(DraftMode.TOP_K, Successors())) is kind


@pytest.mark.parametrize("spec", ["ngram", "tabular:vocab=5", "./folder", "org/model", "ngram+tabular:vocab=3", ""])
def test_other_models_are_no_recipes(spec: str) -> None:
    assert parse_recipe(spec) is None


@pytest.mark.parametrize("spec", ["ngram:contexts=3", "ngram+ngram:", "recycling:width=0"])
def test_the_error_of_a_wrong_recipe_has_the_fix(spec: str) -> None:
    with pytest.raises(ValueError, match=r"write (ngram|recycling): or ngram"):
        parse_recipe(spec)


@pytest.mark.parametrize("law", list(DraftMode))
def test_only_matched_texts_read_what_other_texts_wrote(law: DraftMode) -> None:
    """Under ratio tests another text of the same seed tells of coins that are still to be used; all texts write."""
    recipe = parse_recipe("recycling:")
    shared = Successors()
    fed(recipe.source(DraftMode.SAMPLED, shared), [1, 2, 3])
    assert named(fed(recipe.source(law, shared), [1])) == ([2] if law in (DraftMode.TOP_K, DraftMode.COUPLED) else [])
