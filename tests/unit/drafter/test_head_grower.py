"""The drafter's compiled growth of heads: frames that a verifier can replay, whatever comes between two levels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.engine import networks
from unit.engine.test_head_growth import a_head, a_target

from drafter_service import head_grower
from drafter_service.__main__ import build
from drafter_service.head_grower import HeadGrower
from drafter_service.metrics import Key
from drafter_service.settings import DrafterSettings
from rootward.core.frames import (
    Commit,
    Features,
    Grow,
    NeedSync,
    Open,
    OpenFeatures,
    Reject,
    extend_hash,
    prefix_hash,
)
from rootward.core.growth import BestFirst
from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.requests import DraftMode, DraftStrategy, Sampling
from rootward.core.rng import Key as RandomKey
from rootward.core.rng import Role
from rootward.engine import grower as grower_module
from rootward.engine.grower import Grower
from rootward.engine.head_growth import HeadTrees, compiled_trees

SHAPE = BestFirst(draws_per_level=3)
PREFIX = (5, 9, 4, 12, 33, 2)
OPENING = Open(
    0, 0, PREFIX, Sampling(), DraftMode.SAMPLED, 5, 0, num_atoms=6, node_cap=12, max_depth=4, topk=3, eos_ids=(7, 11)
)
KEY: Key = (1, 4)


class Heads:
    """A `HeadGrower`, and a `Grower` of the same head beside it."""

    def __init__(self, folder: Path, *, slots: int = 4, max_rows: int = 256) -> None:
        target = a_target()
        self.model, of_general = (a_head(folder, target, draft_ids=None, scale=0.5, slots=slots) for _ in range(2))
        self.general: Grower[Key] = Grower(of_general, incarnation=9, best_first=SHAPE)
        self.compiled = compiled_trees(self.model, incarnation=9, best_first=SHAPE)
        assert isinstance(self.compiled, HeadTrees)
        others: Grower[Key] = Grower(self.model, incarnation=9, best_first=SHAPE, max_rows=max_rows)
        self.grower = HeadGrower(self.compiled, others)

    def features(self, num: int, seed: int = 0) -> Features:
        rows = np.random.default_rng(seed).normal(size=(num, self.model.feature_size))
        return Features(rows.astype(np.float32))

    def close(self) -> None:
        for key in self.grower.trees:
            self.grower.close(key)
        while not self.grower.idle:
            assert self.grower.level() == []
        self.model.check_idle()
        assert self.model.num_free_slots == self.model.size.num_slots


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    return Heads(tmp_path)


def opened(grower: Any, key: Key, features: Features, **changes: Any) -> Open:
    """A tree opened with features of the last tokens of its prefix."""
    message = replace(OPENING, slot=key[1], num_features=len(features.rows), **changes)
    assert grower.open(key, message) is None
    for part in features.chunks(key[1], len(message.prefix)):
        assert grower.add_features(key, part) is None
    return message


def commit_of(tree: LivingTree, slot: int, tokens: tuple[int, ...], features: Features | None, **more: Any) -> Commit:
    hash_after = tree.hash
    for token in tokens:
        hash_after = extend_hash(hash_after, token)
    return Commit(slot, tree.length, tokens, hash_after, features=features, **more)


def replica(message: Open) -> LivingTree:
    """As a verifier keeps it."""
    return LivingTree(
        len(message.prefix),
        prefix_hash(message.prefix),
        vocab_size=networks.VOCAB,
        node_cap=message.node_cap,
        max_atoms=message.num_atoms,
        eos_ids=message.eos_ids,
        restarts=True,
    )


def grown(grower: Any) -> list[tuple[Key, Grow]]:
    frames: list[tuple[Key, Grow]] = []
    for _ in range(50):
        if grower.idle:
            return frames
        frames += grower.level()
    raise AssertionError("growth does not come to rest")


def received(tree: LivingTree, frames: list[tuple[Key, Grow]]) -> Snapshot:
    for _, frame in frames:
        assert not tree.receive(frame).stale
    return tree.snapshot(99)


def columns(snapshot: Snapshot) -> tuple[Any, ...]:
    """A row travels with the first child."""
    tree = snapshot.tree
    above = set(tree.parent.tolist())
    rows = [(row[0].tolist(), row[1].tolist()) for i, row in enumerate(snapshot.rows) if row is not None and i in above]
    return snapshot.ids, tree.token[1:].tolist(), tree.parent.tolist(), tree.sampled[1:].tolist(), rows


@pytest.mark.parametrize("nodes", [1, 5, 12])
def test_frames_are_those_of_the_general_grower(heads: Heads, nodes: int) -> None:
    """Chosen trees, which are functions of the text: one frame a level, of the same nodes."""
    for seed, size in ((1, 5), (2, 2)):
        key = 1, 4 + seed
        changes: dict[str, Any] = {"law": DraftMode.TOP_K, "node_budget": nodes}
        for grower in (heads.grower, heads.general):
            message = opened(grower, key, heads.features(size, seed), **changes)
        tree = replica(message)
        for round_ in range(5):
            pairs = list(zip(grown(heads.grower), grown(heads.general), strict=True))
            assert [key for (key, _), _ in pairs] == [key] * len(pairs)
            for (_, found), (_, expected) in pairs:
                assert replace(found, draft_us=0) == replace(expected, draft_us=0)
            assert len(pairs) == -(-nodes // SHAPE.draws(nodes))
            snapshot = received(tree, [pair[0] for pair in pairs])
            assert len(snapshot.ids) == 1 + nodes
            tokens = (int(snapshot.tree.token[1]), 3 + round_)
            commit = commit_of(tree, key[1], tokens, heads.features(2, round_), node_budget=nodes)
            for grower in (heads.grower, heads.general):
                assert list(grower.commit(key, commit)) == []
            tree.commit(tokens)
        heads.grower.close(key)
        heads.general.close(key)
    heads.close()


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY])
def test_drawn_trees_arrive_as_they_were_grown(heads: Heads, law: DraftMode, monkeypatch: pytest.MonkeyPatch) -> None:
    assert heads.compiled is not None
    batches: list[Any] = []
    start = heads.compiled.start
    monkeypatch.setattr(heads.compiled, "start", lambda wanted: batches.append(start(wanted)) or batches[-1])
    message = opened(heads.grower, KEY, heads.features(4), law=law)
    tree = replica(message)
    chosen = 0
    for round_ in range(20):
        found = columns(received(tree, grown(heads.grower)))
        ids, *expected = columns(batches[-1].snapshot(0))
        assert list(found[1:]) == expected
        chosen += expected[2].count(False)
        assert len(ids) > 4
        tokens = (expected[0][0],) if round_ % 2 else (3, 4)
        heads.grower.commit(KEY, commit_of(tree, 4, tokens, heads.features(len(tokens), round_)))
        tree.commit(tokens)
    assert (chosen > 0) == (law is DraftMode.GREEDY)
    heads.close()


def test_a_commit_between_two_levels_starts_a_new_tree(heads: Heads) -> None:
    message = opened(heads.grower, KEY, heads.features(4))
    tree = replica(message)
    first = heads.grower.level()
    assert [frame.at_rest for _, frame in first] == [False]
    commit = commit_of(tree, 4, (3,), heads.features(1))
    assert heads.grower.commit(KEY, commit) == []
    assert heads.grower.commit(KEY, commit) == []  # repeated
    frames = grown(heads.grower)
    assert {frame.base_len for _, frame in frames} == {len(PREFIX) + 1}
    assert frames[0][1].first_node == 1 + len(first[0][1].token)
    assert frames[-1][1].at_rest
    received(tree, first)
    tree.commit((3,))
    assert len(received(tree, frames).ids) == 1 + len(tree)
    heads.close()


def test_a_commit_without_tokens_changes_nothing(heads: Heads) -> None:
    """Growth in general had no text to read and never came to rest."""
    for grower in (heads.grower, heads.general):
        message = opened(grower, KEY, heads.features(4))
        grown(grower)
        assert grower.commit(KEY, commit_of(replica(message), 4, (), None)) == []
        assert grown(grower) == []
    heads.close()


def test_a_tree_whose_batch_has_others_waits_for_its_end(heads: Heads) -> None:
    other = 1, 5
    for key in (KEY, other):
        opened(heads.grower, key, heads.features(4))
    tree = replica(OPENING)
    first = heads.grower.level()
    assert [key for key, _ in first] == [KEY, other]
    heads.grower.commit(KEY, commit_of(tree, 4, (3,), heads.features(1)))
    frames = grown(heads.grower)
    of_other = [i for i, (key, _) in enumerate(frames) if key == other]
    own = [i for i, (key, _) in enumerate(frames) if key == KEY]
    assert max(of_other) < min(own)
    assert frames[max(of_other)][1].at_rest
    assert frames[max(own)][1].at_rest
    heads.close()


def test_a_tree_closed_between_two_levels_keeps_its_slot_until_the_batch_ends(tmp_path: Path) -> None:
    """Its rows of the next forward are written to its cells, which must be nobody else's by then."""
    heads = Heads(tmp_path, slots=2)
    grower, other = heads.grower, (1, 5)
    for key in (KEY, other):
        opened(grower, key, heads.features(4))
    grower.level()
    grower.close(KEY)
    assert list(grower.trees) == [other]
    assert heads.model.num_free_slots == 0
    refused = grower.open(KEY, replace(OPENING, slot=4))
    assert refused == Reject(4, "slot is open already; use a new number")
    new = 1, 6
    opened(grower, new, heads.features(4))
    frames = grown(grower)
    assert [key for key, frame in frames if frame.at_rest] == [other, new]
    heads.close()


def test_a_tree_closed_behind_a_commit_keeps_its_slot_until_the_batch_ends(tmp_path: Path) -> None:
    """Its rows of the next forward were fixed before the commit. Its cells were given away, and every later level failed."""
    heads = Heads(tmp_path, slots=2)
    grower, other = heads.grower, (1, 5)
    for key in (KEY, other):
        opened(grower, key, heads.features(4))
    grower.level()
    grower.commit(KEY, commit_of(replica(OPENING), 4, (3,), heads.features(1)))
    grower.close(KEY)
    assert heads.model.num_free_slots == 0
    assert grown(grower)[-1][1].at_rest
    assert heads.model.num_free_slots == 1
    heads.close()


def test_a_commit_ends_a_batch_in_which_nothing_else_grows(heads: Heads) -> None:
    """No forward is made for rows of given-up trees alone, for which the new tree would wait."""
    other = 1, 5
    opened(heads.grower, KEY, heads.features(4))
    opened(heads.grower, other, heads.features(4), node_budget=1)
    first = heads.grower.level()
    assert [frame.at_rest for _, frame in first] == [False, True]
    heads.grower.commit(KEY, commit_of(replica(OPENING), 4, (3,), heads.features(1)))
    ((key, frame),) = heads.grower.level()
    assert (key, frame.base_len, len(frame.token)) == (KEY, len(PREFIX) + 1, 3)
    heads.grower.close(KEY)
    assert heads.model.num_free_slots == 3  # at once, as nothing runs
    heads.close()


def test_children_drawn_without_a_forward_come_in_a_frame_of_their_own(heads: Heads) -> None:
    """Nodes of the first level all end the text, so the next ones need no forward. No frame waits for what its own tokens decide
    (algorithms.md 6.1): it waited for all of them."""
    changes: dict[str, Any] = {"topk": 6, "max_depth": 1, "node_cap": 6, "law": DraftMode.TOP_K}
    opened(heads.grower, KEY, heads.features(4), **changes)
    likeliest = tuple(token for _, frame in grown(heads.grower) for token in frame.token.tolist())
    assert len(likeliest) == 6  # all atoms of the root
    changes |= {"max_depth": 4, "eos_ids": likeliest}
    for slot, law in enumerate((DraftMode.TOP_K, DraftMode.SAMPLED), 5):
        key = 1, slot
        for grower in (heads.grower, heads.general):
            opened(grower, key, heads.features(4), **{**changes, "law": law})
        found, expected = grown(heads.grower), grown(heads.general)
        assert [(len(frame.token), frame.at_rest) for _, frame in found] == [(3, False), (3, True)]
        assert [(len(frame.token), frame.at_rest) for _, frame in expected] == [(3, False), (3, True)]
    heads.close()


def test_the_time_of_a_round_counts_levels_of_its_own_tree(heads: Heads) -> None:
    """Not those of other trees of the batch."""
    other = 1, 5
    opened(heads.grower, KEY, heads.features(4), node_budget=1)
    opened(heads.grower, other, heads.features(4))
    heads.grower.level()
    small, large = (heads.grower._trees[key] for key in (KEY, other))
    first_s = small.compute_s
    assert first_s == large.compute_s > 0.0
    grown(heads.grower)
    assert small.compute_s == first_s
    assert large.compute_s > first_s
    heads.close()


def test_a_tree_of_many_levels_does_not_keep_those_of_other_verifiers_waiting(heads: Heads) -> None:
    opened(heads.grower, KEY, heads.features(4), node_cap=40, max_depth=40, topk=1)
    heads.grower.level()
    other = 2, 5
    opened(heads.grower, other, heads.features(4))
    assert other in [key for key, _ in heads.grower.level()]
    assert not heads.grower.idle
    grown(heads.grower)
    heads.close()


def test_growth_waits_for_features_and_reads_zeros_for_those_that_are_lost(heads: Heads) -> None:
    message = replace(OPENING, slot=4, num_features=4)
    assert heads.grower.open(KEY, message) is None
    assert heads.grower.idle
    rows = heads.features(4).rows
    assert heads.grower.add_features(KEY, OpenFeatures(4, 2, Features(rows[:2]))) is None
    assert grown(heads.grower) == []  # read, but the tree hangs below the end of the text
    tree = replica(message)
    assert heads.grower.commit(KEY, commit_of(tree, 4, (3, 4), heads.features(1))) == []
    frames = grown(heads.grower)
    assert frames[-1][1].at_rest
    assert len(frames[0][1].token) == 3
    assert heads.grower.open((1, 5), replace(OPENING, slot=5)) is None  # no features are announced: zeros
    assert len(grown(heads.grower)) > 1
    heads.close()


def test_a_long_text_is_read_in_parts_beside_others(tmp_path: Path) -> None:
    """And gives the tree that it gives at once."""
    whole, parts = Heads(tmp_path / "a"), Heads(tmp_path / "b", max_rows=8)
    prefix = tuple(np.random.default_rng(0).integers(12, 60, 40).tolist())
    found = []
    for heads in (whole, parts):
        opened(heads.grower, KEY, heads.features(40), prefix=prefix, law=DraftMode.TOP_K)
        frames, levels = [], 0
        while not heads.grower.idle:
            frames += heads.grower.level()
            levels += 1
        found.append((levels, [replace(frame, draft_us=0) for _, frame in frames]))
        heads.close()
    assert found[1][0] == found[0][0] + 4  # five parts of eight tokens
    assert found[0][1] == found[1][1]


def test_no_tree_is_grown_for_a_round_that_wants_none_or_behind_a_full_context(heads: Heads) -> None:
    message = opened(heads.grower, KEY, heads.features(4), node_budget=0)
    (key, frame), *more = grown(heads.grower)
    assert (key, len(frame.token), frame.at_rest, more) == (KEY, 0, True, [])
    tree = replica(message)
    heads.grower.commit(KEY, commit_of(tree, 4, (3,), heads.features(1), node_budget=2))
    tree.commit((3,))
    assert sum(len(frame.token) for _, frame in grown(heads.grower)) == 2
    tokens = (3,) * (64 - tree.length)
    heads.grower.commit(KEY, commit_of(tree, 4, tokens, heads.features(len(tokens))))
    (_, frame), *more = grown(heads.grower)
    assert (len(frame.token), frame.at_rest, more) == (0, True, [])
    # One token may still come, but none can be drafted: nothing waits for features or a forward.
    assert heads.grower.open((1, 5), replace(OPENING, slot=5, prefix=(3,) * 63, num_features=4)) is None
    ((_, frame),) = grown(heads.grower)
    assert (len(frame.token), frame.at_rest) == (0, True)
    heads.close()


def test_a_text_that_was_not_read_for_long_begins_anew(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is then that of a session that begins with the last tokens, and no features of earlier ones are kept."""
    monkeypatch.setattr(head_grower, "MOST_UNREAD", 8)
    message = opened(heads.grower, KEY, heads.features(4), law=DraftMode.TOP_K)
    tree = replica(message)
    received(tree, grown(heads.grower))
    held = []
    for seed in range(20):
        commit = commit_of(tree, 4, (20 + seed,), heads.features(1, seed), node_budget=0 if seed < 19 else 12)
        assert heads.grower.commit(KEY, commit) == []
        tree.commit((20 + seed,))
        held.append(len(heads.grower._trees[KEY].features))
    assert held[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 4]
    assert max(held) == 8
    found = columns(received(tree, grown(heads.grower)))
    assert len(found[1]) == 12
    text = (*PREFIX, *range(20, 40))
    num = held[-1]
    rows = np.concatenate([heads.features(1, seed).rows for seed in range(20 - num, 20)])
    other = opened(heads.grower, (1, 5), Features(rows), law=DraftMode.TOP_K, prefix=text)
    assert columns(received(replica(other), grown(heads.grower)))[1:] == found[1:]
    heads.close()


def test_what_it_cannot_take_is_refused(heads: Heads) -> None:
    grower = heads.grower
    message = opened(grower, KEY, heads.features(4))
    tree = replica(message)
    wrong = Features(np.zeros((1, 3), np.float32))
    expected = f"features: rows of 3 numbers; this drafter takes {heads.model.feature_size}, as its HelloAck says"
    assert grower.add_features(KEY, OpenFeatures(4, 2, wrong)) == Reject(4, expected)
    assert grower.commit(KEY, commit_of(tree, 4, (3,), wrong)) == [Reject(4, expected)]
    lost = NeedSync(4, tree.length, tree.hash)
    assert grower.commit(KEY, replace(commit_of(tree, 4, (3,), None), hash_after=1)) == [lost]
    assert grower.commit(KEY, commit_of(tree, 4, (networks.VOCAB,), None)) == [lost]
    assert grower.commit((1, 99), commit_of(tree, 99, (3,), None)) == [NeedSync(99, 0, 0)]
    assert grower.open(KEY, message) == Reject(4, "slot is open already; use a new number")
    for slot in (5, 6, 7):
        opened(grower, (1, slot), heads.features(1))
    assert grower.open((1, 8), replace(OPENING, slot=8)) == Reject(8, "no free slot", retry_after_ms=1000)
    heads.close()


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": Sampling(top_p=0.5)},
        {"strategy": DraftStrategy("rsd_c", (2, 2))},
        {"law": DraftMode.COUPLED},
        {"prediction": (12, 33, 2, 17, 22, 3), "num_prompt": 3},
    ],
)
def test_other_trees_grow_beside_them(heads: Heads, change: dict[str, Any]) -> None:
    other = 1, 5
    opened(heads.grower, KEY, heads.features(4))
    opened(heads.grower, other, heads.features(4), **change)
    frames = grown(heads.grower)
    for key in (KEY, other):
        assert sum(len(frame.token) for of, frame in frames if of == key) > 3
        assert [frame.at_rest for of, frame in frames if of == key][-1]
    assert set(heads.grower.trees) == {KEY, other}
    heads.close()


def test_requests_get_other_random_words_here_than_beside(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both count their draws from 1, and the key of a request is the same."""
    words: set[tuple[int, int]] = set()
    compiled = build(heads.model, DrafterSettings(model="head:x", target="x")).grower
    assert isinstance(compiled, HeadGrower)
    limits, new_words = compiled._compiled._limits, grower_module.DrawWords

    def seen(key: int, number: int) -> None:
        assert (key, number) not in words
        words.add((key, number))

    def limited(*given: Any) -> Any:
        found = limits(*given)
        for key, number in zip(found[0].key.tolist(), found[0].draw_number.tolist(), strict=True):
            seen(key, number)
        return found

    def drawn(key: RandomKey, incarnation: int, number: int) -> Any:
        seen(key.derive(Role.DRAW, incarnation), number)
        return new_words(key, incarnation, number)

    monkeypatch.setattr(compiled._compiled, "_limits", limited)
    monkeypatch.setattr(grower_module, "DrawWords", drawn)
    opened(compiled, KEY, heads.features(4))
    opened(compiled, (1, 5), heads.features(4), sampling=Sampling(top_p=0.5))
    grown(compiled)
    assert len(words) > 2
    for key in compiled.trees:
        compiled.close(key)


def test_a_failed_forward_leaks_no_slot(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (KEY, (1, 5)):
        opened(heads.grower, key, heads.features(4))
    heads.grower.level()
    heads.grower.close(KEY)
    with monkeypatch.context() as broken:
        broken.setattr(heads.model, "expanded", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            heads.grower.level()
    heads.close()
    opened(heads.grower, KEY, heads.features(4))
    assert grown(heads.grower)[-1][1].at_rest
    heads.close()


def test_random_messages_leave_whole_trees_and_no_leaks(tmp_path: Path) -> None:
    """Opens, commits, closes and levels in random order: at rest, each replica holds the tree of its text."""
    heads = Heads(tmp_path, slots=3, max_rows=5)
    rng = np.random.default_rng(7)
    trees: dict[Key, LivingTree] = {}
    num_closed_early = num_grown = 0
    for slot in range(1, 400):
        choice = rng.integers(6)
        if choice == 0 and len(trees) < 3:
            num = int(rng.integers(0, 7))
            laws = DraftMode.SAMPLED, DraftMode.GREEDY, DraftMode.TOP_K
            change = {"law": laws[slot % 3], "seed": slot, "node_budget": int(rng.integers(0, 13))}
            trees[1, slot] = replica(opened(heads.grower, (1, slot), heads.features(num, slot), **change))
        elif choice == 1 and trees:
            key = list(trees)[int(rng.integers(len(trees)))]
            tree = trees[key]
            tokens = tuple(rng.integers(12, 60, int(rng.integers(1, 4))).tolist())
            if tree.length + len(tokens) < 60:
                features = heads.features(int(rng.integers(1, len(tokens) + 1)), slot)
                budget = int(rng.integers(0, 13))
                commit = commit_of(tree, key[1], tokens, features, node_budget=budget)
                assert heads.grower.commit(key, commit) == []
                tree.commit(tokens)
        elif choice == 2 and trees and rng.random() < 0.3:
            key = list(trees)[int(rng.integers(len(trees)))]
            num_closed_early += not heads.grower.idle
            heads.grower.close(key)
            del trees[key]
        else:
            for key, frame in heads.grower.level():
                received = trees[key].receive(frame)
                assert not received.reason
                assert not received.stale
                num_grown += received.kept
    for key, frame in grown(heads.grower):
        assert not trees[key].receive(frame).stale
    assert all(tree.broken == "" for tree in trees.values())
    assert num_closed_early > 3
    assert num_grown > 200
    heads.close()
