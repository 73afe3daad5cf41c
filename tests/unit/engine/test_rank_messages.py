"""What rank 0 sends arrives as it was, and nothing else is taken for a message."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest

from rootward.engine.kv_tree import Moves
from rootward.engine.probe import ProbeReport
from rootward.engine.rank_messages import Done, Move, Probed, Run, decode, encode
from rootward.engine.slots import Entry, Size, Slots
from rootward.ports import COMMITTED, Rows


def entries() -> list[Entry]:
    """A prompt, and a tree of another session below its committed prefix."""
    slots = Slots(Size(num_slots=2, num_cells=64, max_positions=48, num_blocks=32, block_size=4), 32, "weights")
    a, b = slots.open(), slots.open()
    with slots.placed([Rows.chain(b, 1, [5] * 9)]):
        pass
    slots.commit_cells(b, 9, keep_below=False)
    tree = Rows(b, np.array([20, 21, 22]), np.array([COMMITTED, 20, 20]), np.array([3, 4, 5]))
    with slots.placed([Rows.chain(a, 1, [7, 8, 9]), tree]) as placed:
        return [
            replace(entry, table=copy.deepcopy(entry.table)) for entry in placed
        ]  # the tables are given back on leaving


def test_a_forward_arrives_as_it_was() -> None:
    sent = entries()
    received = decode(encode(Run.of(sent, [range(2, 3), range(3)])))
    assert isinstance(received, Run)
    found, kept = received.arguments()
    assert kept == [range(2, 3), range(3)]
    for ours, theirs in zip(found, sent, strict=True):
        for name in ("slot", "node", "parent", "token"):
            np.testing.assert_array_equal(getattr(ours.rows, name), getattr(theirs.rows, name))
        for name in ("num_rows", "length", "node", "token", "scratch", "position", "ancestors", "end", "version"):
            np.testing.assert_array_equal(getattr(ours.plan, name), getattr(theirs.plan, name))
        np.testing.assert_array_equal(ours.table.blocks, theirs.table.blocks)
        assert ours.table.block_size == theirs.table.block_size


def test_moves_a_report_and_the_end_arrive_as_they_were() -> None:
    moves = Moves(np.array([5, 6]), np.array([12, 9]), np.array([3, 4]))
    moved = decode(encode(Move.of(moves)))
    assert isinstance(moved, Move)
    (found,) = moved.arguments()
    for name in ("token", "source", "target"):
        np.testing.assert_array_equal(getattr(found, name), getattr(moves, name))
    report = ProbeReport(False, "sdpa", math.inf, "rows are off", 12)
    assert decode(encode(Probed(report=report))) == Probed(report=report)
    assert decode(encode(Done())) == Done()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        pickle.dumps(("run", ())),
        b'{"do": "expose", "states": [1]}',
        b'{"do": "done", "more": 1}',
        b'{"do": "move", "token": "AAA", "source": "", "target": ""}',
    ],
)
def test_nothing_else_is_a_message(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)
