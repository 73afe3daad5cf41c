"""Frames that no honest drafter sends, and the small print of re-rooting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rootward.core.frames import Grow, extend_hash
from rootward.core.living_tree import LivingTree, MalformedFrame

ROW = (np.array([0, 1, 2]), np.array([5, 3, 2]))


def grow(
    first: int, parent: list[int], token: list[int], *, base: int = 2, hash_: int = 9, rows=None, sampled=None
) -> Grow:
    flags = np.array(sampled if sampled is not None else [True] * len(token), dtype=np.bool_)
    rows = {0: ROW} if rows is None else rows
    return Grow(1, base, hash_, first, np.array(parent, dtype=np.int64), np.array(token, dtype=np.int64), flags, rows)


def tree(**kwargs) -> LivingTree:
    return LivingTree(2, 9, vocab_size=3, **{"node_cap": 8, **kwargs})


@pytest.mark.parametrize(
    "frame",
    [
        grow(1, [1], [0]),
        grow(1, [-1], [0]),
        grow(1, [0], [3]),
        grow(1, [0], [-1]),
        grow(1, [0, 0], [1, 1]),
        grow(1, [0], [0], rows={}),
        grow(1, [0], [2], rows={0: (np.array([0, 1]), np.array([1, 1]))}),
        grow(1, [0], [0], rows={0: (np.array([0, 0]), np.array([1, 1]))}),
        grow(1, [0], [0], rows={0: (np.array([0, 9]), np.array([1, 1]))}),
        grow(1, [0], [0], rows={0: (np.array([0]), np.array([0]))}),
        grow(1, [0], [0], rows={0: (np.array([0]), np.array([70000]))}),
        grow(1, [0, 1, 2, 3, 4, 5, 6, 7, 8], [0] * 9, sampled=[False] * 9),
    ],
    ids=[
        "own parent", "negative parent", "token too large", "negative token", "twin siblings", "drawn without a row",
        "no mass", "atom twice", "atom outside", "weight zero", "weight too large", "over the cap",
    ],
)  # fmt: skip
def test_malformed_frames_end_growth_and_nothing_else(frame: Grow) -> None:
    replica = tree()
    with pytest.raises(MalformedFrame):
        replica.receive(frame)
    assert replica.broken
    held = len(replica)
    assert replica.receive(grow(held + 1, [0], [0])).reason == "broken"
    assert len(replica) == held  # what came before the bad node stays usable
    assert len(replica.commit([0, 1])) == 2


def test_a_second_row_for_the_same_node_is_refused() -> None:
    replica = tree()
    replica.receive(grow(1, [0], [0]))
    with pytest.raises(MalformedFrame, match="second row"):
        replica.receive(grow(2, [0], [1], rows={0: (np.array([0, 1]), np.array([1, 9]))}))


def test_nothing_grows_below_the_end_of_a_sequence() -> None:
    replica = tree(eos_ids=[0])
    with pytest.raises(MalformedFrame, match="end-of-sequence"):
        replica.receive(grow(1, [0, 1], [0, 1], rows={0: ROW, 1: ROW}))


def test_a_gap_a_foreign_hash_and_a_future_base_break() -> None:
    for frame in (grow(2, [0], [0]), grow(1, [0], [0], hash_=8), grow(1, [0], [0], base=3)):
        replica = tree()
        assert replica.receive(frame).stale == 1
        assert replica.broken


def test_what_arrived_before_a_gap_is_still_verified() -> None:
    replica = tree()
    replica.receive(grow(1, [0], [0]))
    replica.receive(grow(5, [0], [1]))
    assert replica.broken == "gap"
    assert replica.snapshot(8).tree.path(1) == (0,)


def test_what_was_walked_over_is_named_once() -> None:
    """Or nodes under an old base could go on for ever, and every one of them be remembered."""
    replica = tree()
    replica.commit([1])
    replica.receive(grow(1, [0, 1], [1, 0], rows={0: ROW, 1: ROW}))
    assert len(replica) == 1
    with pytest.raises(MalformedFrame, match="walked over"):
        replica.receive(grow(3, [0], [1]))


@pytest.mark.parametrize("nodes", [9, 1 << 20])
def test_a_frame_of_more_nodes_than_one_base_may_have_is_not_even_looked_at(nodes: int) -> None:
    replica = tree()
    replica.commit([1])
    with pytest.raises(MalformedFrame, match="cap of 8"):
        replica.receive(grow(1, [0] * nodes, [0] * nodes))
    with pytest.raises(MalformedFrame, match="cap of 8"):
        tree().receive(grow(1, [0], [0], rows={node: ROW for node in range(nodes + 1)}))
    assert len(replica) == 0


def test_nodes_that_hang_nowhere_do_not_come_without_end() -> None:
    """They cost a verifier time, and no cap of live nodes counts them."""
    replica = tree()
    replica.receive(grow(1, [0], [0]))
    replica.commit([1])  # node 1 is dead, and what hangs below it
    hash_ = extend_hash(9, 1)
    for first in range(2, 10):
        frame = grow(first, [1], [0], base=3, hash_=hash_, rows={}, sampled=[False])
        assert replica.receive(frame).stale == 1
    with pytest.raises(MalformedFrame, match="1 nodes and 0 rows, after 8 nodes, of one base exceed the cap of 8"):
        replica.receive(grow(10, [1], [0], base=3, hash_=hash_, rows={}, sampled=[False]))


def test_a_commit_makes_room_for_nodes() -> None:
    replica = tree()
    replica.receive(grow(1, [0, 1, 2, 3], [1] * 4, rows={}, sampled=[False] * 4))
    replica.commit([1])
    more = grow(5, [4, 5, 6, 7, 8], [1] * 5, base=3, hash_=extend_hash(9, 1), rows={}, sampled=[False] * 5)
    assert replica.receive(more).kept == 5
    assert len(replica) == 8


def test_a_tree_that_restarts_takes_no_guesses() -> None:
    """A commit drops all nodes; guesses that it went on counting would make the number of the others negative."""
    replica = tree(restarts=True, ahead_cap=4)
    frame = replace(grow(1, [0, 1], [1, 0], rows={}, sampled=[False, False]), guess=np.array([True, False]))
    with pytest.raises(MalformedFrame, match="0 in and below guesses"):
        replica.receive(frame)
    replica.commit([2])
    assert len(replica) == 0


def test_duplicates_are_harmless() -> None:
    replica = tree()
    frame = grow(1, [0, 1], [0, 1], rows={0: ROW, 1: ROW})
    assert replica.receive(frame).kept == 2
    assert replica.receive(frame).reason == "duplicate"
    assert list(replica.nodes) == [1, 2]


def test_growth_under_an_older_base_hangs_below_the_new_root() -> None:
    replica = tree()
    replica.receive(grow(1, [0], [0]))
    replica.commit([0, 2])  # accepted node 1, then a bonus token nobody drew yet
    late = replica.receive(grow(2, [1, 2, 0], [2, 1, 1], rows={1: ROW, 2: ROW}))
    # Node 2 spells the bonus token, node 3 hangs below it, node 4 is off the path.
    assert (late.kept, late.stale) == (1, 2)
    assert replica.snapshot(8).tree.path(1) == (1,)
    assert replica.root.row is not None


def test_a_cut_keeps_draw_order_and_the_tree_lives_on() -> None:
    replica = tree()
    replica.receive(grow(1, [0, 0, 1], [0, 1, 2], rows={0: ROW, 1: ROW}))
    snapshot = replica.snapshot(2)
    assert snapshot.ids == (0, 1, 2)
    assert len(replica) == 3
    assert replica.commit([0]) == [1]
    assert replica.hash == extend_hash(9, 0)
    assert list(replica.nodes) == [3]
