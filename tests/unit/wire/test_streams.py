"""A frame too large for one message is sent as several, with nothing lost or reordered."""

from __future__ import annotations

from hypothesis import given, settings
from support import wire
from support.codec import from_pb, to_pb

from rootward.core.frames import FromDrafter, ToDrafter
from rootward.wire.channel import parts


def joined(frames):
    first = frames[0]
    for frame in frames[1:]:
        fields = {}
        for name in first.__slots__:
            a, b = getattr(first, name), getattr(frame, name)
            fields[name] = a + b if isinstance(a, tuple) else (b if a is None else a)
        first = type(first)(**fields)
    return first


@settings(deadline=None)  # a busy machine may take its time
@given(wire.to_drafter | wire.from_drafter)
def test_parts_join_to_the_frame(frame: ToDrafter | FromDrafter):
    for limit in (1, 40, 200):
        assert joined([from_pb(part) for part in parts(to_pb(frame), limit)]) == frame


def test_a_small_frame_stays_whole():
    message = to_pb(ToDrafter())
    assert list(parts(message)) == [message]
