"""The codec gives back what it was given, and survives whatever a peer sends."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wire
from support.codec import from_pb, parse, to_pb

from rootward.core.frames import Features, FromDrafter, OpenFeatures, ToDrafter
from rootward.core.living_tree import LivingTree, MalformedFrame
from rootward.core.requests import Sampling, VerifierRequest
from rootward.v1 import control_pb2, drafter_pb2, generate_pb2, verifier_pb2
from rootward.wire.channel import split_message
from rootward.wire.drafter_codec import MOST_ANSWERS, MOST_NODES, MOST_NUMBERS, from_drafter_from_pb
from rootward.wire.records import Record

GOOD = drafter_pb2.Features(num_rows=1, values=bytes(4))
MESSAGES = [
    drafter_pb2.ToDrafter,
    drafter_pb2.FromDrafter,
    drafter_pb2.DrafterInfo,
    verifier_pb2.VerifierRequest,
    verifier_pb2.Committed,
    verifier_pb2.VerifierInfo,
    control_pb2.ModelInfo,
]


@given(wire.anything)
def test_a_value_survives_the_wire(value):
    message = to_pb(value)
    assert from_pb(parse(type(message), message.SerializeToString())) == value


@given(wire.grows())
def test_arrays_come_back_with_the_types_of_the_domain(grow):
    again = from_pb(to_pb(FromDrafter(grows=(grow,)))).grows[0]
    assert [again.parent.dtype, again.token.dtype, again.sampled.dtype] == ["int64", "int64", "bool"]
    assert all(ids.dtype == weights.dtype == "int64" for ids, weights in again.rows.values())
    assert list(again.rows) == list(grow.rows)


def survives(message_type, data: bytes) -> None:
    """Decoding gives a value or ValueError; a value can be encoded again."""
    try:
        value = from_pb(parse(message_type, data))
    except ValueError:
        return
    to_pb(value)


@given(st.sampled_from(MESSAGES), st.binary(max_size=200))
def test_noise_is_refused_or_valid(message_type, data):
    survives(message_type, data)


@settings(max_examples=300)
@given(wire.anything, st.randoms(use_true_random=False))
def test_mutated_frames_are_refused_or_valid(value, rng: random.Random):
    message = to_pb(value)
    data = bytearray(message.SerializeToString())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        edit = rng.choice(["set", "cut", "add"])
        if edit == "set" and at < len(data):
            data[at] = rng.randrange(256)
        elif edit == "cut":
            del data[at : at + rng.randint(1, 4)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
    survives(type(message), bytes(data))


def grow(**fields) -> drafter_pb2.FromDrafter:
    good = {"num_nodes": 2, "parent": b"\0\1", "token": b"\5\6"}
    return drafter_pb2.FromDrafter(grows=[drafter_pb2.Grow(**{**good, **fields})])


def rows(**fields) -> drafter_pb2.FromDrafter:
    good = {"num_rows": 1, "node": b"\0", "length": b"\2", "ids": b"\1\2", "weights": b"\3\4"}
    return grow(rows=drafter_pb2.GrowRows(**{**good, **fields}))


def request(**fields) -> verifier_pb2.VerifierRequest:
    message = to_pb(VerifierRequest("r", (1,)))
    for name, value in fields.items():
        if isinstance(value, (int, float, bytes)):
            setattr(message, name, value)
        else:
            getattr(message, name).CopyFrom(value)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (drafter_pb2.ToDrafter(commits=[drafter_pb2.Commit(tokens=b"1")]), "commit.tokens"),
        (request(prompt=b""), "prompt"),
        (request(prompt=b"12345"), "prompt"),
        (request(epoch=0), "epoch"),
        (request(deadline_s=float("inf")), "deadline_s"),
        (request(stopping=verifier_pb2.VerifierRequest.Stopping()), "max_tokens"),
        (request(sampling=generate_pb2.Sampling(temperature=-1)), "temperature"),
        (request(sampling=generate_pb2.Sampling(seed=1)), "sampling"),
        (request(sampling=generate_pb2.Sampling(min_p=1.1)), "min_p"),
        (request(decoding=generate_pb2.Decoding(presence_penalty=3)), "presence_penalty"),
        (request(decoding=generate_pb2.Decoding(logit_bias={1: 101})), "logit_bias"),
        (request(decoding=generate_pb2.Decoding(json_schema="")), "json_schema"),
        (request(logprobs=21), "logprobs"),
        (verifier_pb2.Committed(logprobs=generate_pb2.Logprobs(emitted=bytes(4))), "logprobs"),
        (verifier_pb2.Committed(logprobs=generate_pb2.Logprobs(top_token_ids=bytes(4))), "logprobs"),
        (
            verifier_pb2.Committed(tokens=bytes(4), accepted=b"\1", logprobs=generate_pb2.Logprobs(emitted=b"123")),
            "logprobs.emitted",
        ),
        (request(speculation=verifier_pb2.VerifierRequest.Policy(mode=9)), "speculation.mode"),
        (verifier_pb2.Committed(tokens=bytes(4)), "accepted"),
        (verifier_pb2.Committed(tokens=bytes(4), accepted=b"\2"), "accepted"),
        (verifier_pb2.Committed(finish=verifier_pb2.Committed.Finish()), "finish.reason"),
    ],
)
def test_an_error_names_the_field(message, field):
    with pytest.raises(ValueError, match=rf"^{field}: "):
        from_pb(message)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prefix": b"123", "law": 1}, "open.prefix"),
        ({}, "open.law"),
        ({"law": 1, "sampling": generate_pb2.Sampling(n=1)}, "sampling"),
    ],
)
def test_an_open_that_cannot_be_read_is_rejected_and_the_rest_of_the_frame_is_read(wrong, field):
    frame = from_pb(
        drafter_pb2.ToDrafter(opens=[drafter_pb2.Open(slot=7, **wrong)], closes=[drafter_pb2.Close(slot=3)])
    )
    (fault,) = frame.unreadable
    assert fault.slot == 7
    assert fault.reason.startswith(f"{field}: ")
    assert (frame.opens, frame.closes[0].slot) == ((), 3)


def sent(rows: np.ndarray, *, int8: bool) -> tuple[drafter_pb2.Features, np.ndarray]:
    """The message of some features, and what a drafter reads in it."""
    message = to_pb(ToDrafter(features=(OpenFeatures(7, 3, Features(rows, int8)),)))
    (part,) = from_pb(parse(type(message), message.SerializeToString())).features
    assert (part.slot, part.first, part.features.int8) == (7, 3, int8)
    return message.features[0].features, part.features.rows


def test_features_travel_as_bfloat16_or_as_int8_with_a_scale_per_row() -> None:
    rows = np.random.default_rng(1).normal(size=(20, 64), scale=30).astype(np.float32)
    rows[4] = 0
    message, found = sent(rows, int8=False)
    assert np.array_equal(found, torch.from_numpy(rows).bfloat16().float().numpy())
    assert len(message.values) == Features(rows).num_bytes == 2 * rows.size
    message, found = sent(rows, int8=True)
    assert (np.abs(found - rows) <= np.abs(rows).max(1, keepdims=True) / 254 * 1.001).all()
    assert len(message.values) + len(message.scale) == Features(rows, True).num_bytes == rows.size + 4 * 20


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"num_rows": 0}, "features.values: 8 bytes for 0 rows"),
        ({"num_rows": 3}, "features.values: 8 bytes for 3 rows"),
        ({"num_rows": 2**32 - 1}, "features.values"),
        ({"values": b""}, "features.values"),
        ({"values": bytes(2 * MOST_NUMBERS + 4)}, "features.values"),
        ({"values": b"\xc0\x7f" * 4}, "features.values: a number"),  # not a number
        ({"values": b"\x80\xff" * 4}, "features.values: a number"),  # -infinity
        ({"scale": bytes(9)}, "features.scale: 9 bytes for 2 rows"),
        ({"scale": b"\0\0\x80\x7f" * 2}, "features.values: a number"),
        ({"scale": b"\0\0\0\x7f" * 2, "values": b"\x7f" * 8}, "features.values: a number"),
    ],
)
@pytest.mark.parametrize("place", ["commits", "features"])
def test_features_that_cannot_be_read_cost_their_slot_and_not_the_stream(place, wrong, field):
    features = drafter_pb2.Features(**({"num_rows": 2, "values": bytes(8)} | wrong))
    holder = drafter_pb2.Commit if place == "commits" else drafter_pb2.OpenFeatures
    frame = from_pb(
        drafter_pb2.ToDrafter(**{place: [holder(slot=7, features=features), holder(slot=8, features=GOOD)]})
    )
    (fault,) = frame.unreadable
    assert fault.slot == 7
    assert fault.reason.startswith(field)
    assert [message.slot for message in getattr(frame, place)] == [8]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (grow(parent=b"\0"), "grow.parent"),
        (grow(token=b"123"), "grow.token"),
        (grow(token=bytes(10)), "grow.token"),
        (grow(num_nodes=0), "grow.parent"),
        (grow(num_nodes=2**32 - 1), "grow.parent"),
        (grow(sampled=b"\1\1"), "grow.sampled"),
        (rows(node=b""), "grow.rows.node"),
        (rows(length=b"\3"), "grow.rows.ids"),
        (rows(weights=b"\3"), "grow.rows.weights"),
        (rows(num_rows=2, node=b"\1\1", length=b"\1\1"), "grow.rows.node"),
        (rows(length=b"\xff\xff\xff\xff"), "grow.rows.ids"),
    ],
)
def test_growth_that_cannot_be_read_costs_its_slot_and_not_the_stream(message, field):
    good = grow(slot=8).grows[0]
    message.grows[0].slot = 7
    message.grows.append(good)
    bad, fine = from_pb(message).grows
    assert bad.slot == 7
    assert bad.fault.startswith(f"{field}: ")
    assert (fine.slot, fine.fault, len(fine.token)) == (8, "", 2)
    tree = LivingTree(0, 0, vocab_size=9)
    with pytest.raises(MalformedFrame):
        tree.receive(bad)
    assert tree.broken == "malformed"


def test_absent_sampling_is_the_default_and_zero_is_greedy():
    assert from_pb(request(sampling=generate_pb2.Sampling())).sampling == Sampling()
    assert from_pb(request(sampling=generate_pb2.Sampling(temperature=0))).sampling.greedy


def test_laws_of_a_newer_drafter_are_left_out():
    message = drafter_pb2.FromDrafter(ack=drafter_pb2.HelloAck(laws=[1, 77]))
    assert len(from_pb(message).ack.laws) == 1


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
        assert joined([from_pb(part) for part in split_message(to_pb(frame), limit)]) == frame


def test_a_small_frame_stays_whole():
    message = to_pb(ToDrafter())
    assert list(split_message(message)) == [message]


@dataclass(frozen=True)
class Renamed:
    worker: str
    size: int


@dataclass(frozen=True)
class Mode:
    laws: tuple[int, ...]


def test_a_record_refuses_fields_that_the_message_does_not_have():
    with pytest.raises(TypeError, match="Renamed: size is no field of both HelloAck"):
        Record(Renamed, drafter_pb2.HelloAck)


def test_a_record_refuses_enums_and_messages_without_a_conversion():
    with pytest.raises(TypeError, match="laws: is a message or an enum"):
        Record(Mode, drafter_pb2.HelloAck)


def test_a_message_of_millions_of_empty_answers_is_refused_before_they_are_read():
    """Two bytes each, microseconds each: 4 MiB of them would stop the verifier of all other drafters for ten seconds."""
    many = drafter_pb2.FromDrafter.FromString(b"\x12\x00" * (MOST_ANSWERS + 1))
    with pytest.raises(ValueError, match=f"grows, need_syncs, rejects: {MOST_ANSWERS + 1} are more than"):
        from_drafter_from_pb(many)


def test_a_frame_with_too_many_nodes_and_rows_is_refused_before_they_are_read():
    """A dishonest drafter would stop the verifier's event loop with them."""
    rows = drafter_pb2.GrowRows(num_rows=MOST_NODES, node=bytes(MOST_NODES), length=bytes(MOST_NODES))
    with pytest.raises(ValueError, match=f"{MOST_NODES + 1} nodes and rows are more than {MOST_NODES}"):
        from_drafter_from_pb(drafter_pb2.FromDrafter(grows=[drafter_pb2.Grow(num_nodes=1, rows=rows)]))
