"""Bytes of a round of 64 nodes, in the frames of a real drafter: those of a round that wait join into one."""

from __future__ import annotations

import pytest
from support.codec import to_pb

from drafter_service.stream import Stream
from rootward.core.frames import Commit, FromDrafter, Open, extend_hash
from rootward.core.requests import DraftMode, Sampling
from rootward.engine.grower import Grower
from rootward.engine.tabular import TabularModel

NODES, ATOMS = 64, 32


def rounds(law: DraftMode, num_rounds: int) -> tuple[list[int], list[int]]:
    """Bytes of each round as one frame, and as one frame per level."""
    grower: Grower[int] = Grower(TabularModel(40_000, seed=1, order=1, sharpness=3.0), incarnation=7)
    prefix = tuple(range(1000))
    grower.open(1, Open(1, 1, prefix, Sampling(1.0), law, 5, 0, ATOMS, NODES, 8, 4))
    length, hash_ = len(prefix), 0
    for token in prefix:
        hash_ = extend_hash(hash_, token)
    joined, apart = [], []
    for _ in range(num_rounds):
        stream, levels = Stream(1, 4), 0
        while not grower.idle:
            for _, grow in grower.level():
                stream.put(grow)
                levels += to_pb(FromDrafter(grows=(grow,))).ByteSize()
        frame = stream.take()
        assert frame is not None
        assert len(frame.grows) == 1
        assert len(frame.grows[0].token) == NODES
        joined.append(to_pb(frame).ByteSize())
        apart.append(levels)
        hash_ = extend_hash(hash_, 39_999)  # a bonus token that was not drafted: the next round begins anew
        grower.commit(1, Commit(1, length, (39_999,), hash_))
        length += 1
    return joined, apart


@pytest.mark.parametrize(
    ("law", "most", "most_by_level"), [(DraftMode.COUPLED, 300, 1200), (DraftMode.SAMPLED, 16 << 10, 16 << 10)]
)
def test_a_round_of_64_nodes_is_small(law: DraftMode, most: int, most_by_level: int) -> None:
    joined, apart = rounds(law, 3)
    assert max(joined) <= most
    assert max(apart) <= most_by_level
