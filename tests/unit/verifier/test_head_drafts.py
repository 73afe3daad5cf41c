"""Trees of a draft head for several sessions at once; when a step of it counts as catching up; how many states are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.heads import TabularHead

from rootward.core.frames import Open
from rootward.core.requests import DraftMode, Sampling
from rootward.engine.tabular import TabularModel
from rootward.ports import TreeToGrow
from verifier_service import head_drafts
from verifier_service.head_drafts import HeadDrafts

TEXTS = {1: [0, 1, 2], 2: [3, 0, 1, 4, 2], 3: [3, 2]}  # all end alike: only their features differ
NODES = 2
OPENING = Open(0, 0, (), Sampling(), DraftMode.SAMPLED, 1, 0, num_atoms=5, node_cap=NODES, max_depth=2, topk=2)


def drafts() -> HeadDrafts:
    return HeadDrafts(TabularHead(TabularModel(5, max_slots=1), max_slots=4), incarnation=1)


def observe(heads: HeadDrafts, session: int, first: int, tokens: list[int]) -> None:
    """Of each token the state that tells the one before it, as `TabularHead` reads them."""
    heads.observe(session, first, torch.tensor([[float(token)] for token in tokens]))


def root_rows(heads: HeadDrafts, sessions: list[int]) -> list[tuple[list[int], list[int]]]:
    """The declared draft distribution after the text of each session."""
    found = []
    for snapshot in heads.grow([TreeToGrow(one, TEXTS[one], OPENING, NODES) for one in sessions]):
        assert snapshot is not None
        row = snapshot.rows[0]
        assert row is not None
        found.append((np.asarray(row[0]).tolist(), np.asarray(row[1]).tolist()))
    return found


def test_each_session_is_drafted_for_by_its_own_features() -> None:
    alone = []
    for session, text in TEXTS.items():
        heads = drafts()
        observe(heads, session, 0, text[:-1])
        alone += root_rows(heads, [session])
    together = drafts()
    for session, text in TEXTS.items():
        observe(together, session, 0, text[:-1])
    assert root_rows(together, list(TEXTS)) == alone
    assert alone[0] != alone[1] != alone[2] != alone[0]


def test_a_session_without_states_gets_no_tree_and_the_others_do() -> None:
    heads = drafts()
    observe(heads, 1, 0, TEXTS[1][:-1])
    wanted = [TreeToGrow(one, TEXTS[one], OPENING, NODES) for one in (2, 1)]
    missing, found = heads.grow(wanted)
    assert missing is None
    assert found is not None


@pytest.mark.parametrize(
    ("new_tokens", "expected"),
    [
        ([9, 1, 1], [True, False, False]),  # the prompt, then rounds
        ([9, 1, 9, 1], [True, False, True, False]),  # rounds without trees between them
        ([9, 9, 1, 9], [True, True, False, True]),  # sessions that begin in two steps
        ([9] * 6, [True] * 4 + [False] * 2),  # where every step has a new session, that is the usual time
    ],
)
def test_a_step_catches_up_if_it_reads_much_text_unless_that_is_usual(
    new_tokens: list[int], expected: list[bool]
) -> None:
    heads, text, found = drafts(), [0], []
    for num in new_tokens:
        observe(heads, 1, len(text) - 1, [0] * num)
        text += [0] * num
        heads.grow([TreeToGrow(1, text, OPENING, NODES)])
        found.append(heads.catches_up)
    assert found == expected


def test_the_head_reads_the_last_positions_of_a_long_stretch_without_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """States come one by one; however many there are, at most twice the window is kept, and the window is read."""
    monkeypatch.setattr(head_drafts, "MOST_POSITIONS", 4)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, 40).tolist()
    heads, fused = drafts(), []
    fuse = heads.model.fuse
    monkeypatch.setattr(heads.model, "fuse", lambda states: fused.append(len(states)) or fuse(states))
    for end in range(1, len(text)):
        observe(heads, 1, end - 1, [text[end - 1]])
        kept = heads._observed[1]
        assert kept.end == end
        assert sum(map(len, kept.parts)) == kept.end - kept.first < 8
        if end % 7 == 0:
            (tree,) = heads.grow([TreeToGrow(1, text[: end + 1], OPENING, NODES)])
            assert tree is not None
    assert fused == [4] * 5


def test_a_head_with_a_window_reads_no_more_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TabularHead(TabularModel(5, max_slots=1), max_slots=4)
    model.window, fused, fuse = 6, [], model.fuse
    monkeypatch.setattr(model, "fuse", lambda states: fused.append(len(states)) or fuse(states))
    heads, text = HeadDrafts(model, incarnation=1), [2] * 41
    observe(heads, 1, 0, text[:-1])
    (tree,) = heads.grow([TreeToGrow(1, text, OPENING, NODES)])
    assert tree is not None
    assert fused == [6]
