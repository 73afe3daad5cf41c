"""Blocks as numbers: what the scheduler is told must be what the model would take; who is let in finds what it was promised."""

from __future__ import annotations

import pytest
from support.kv import blocks_needed
from support.services import request

from rootward.core.requests import DraftMode, Rule
from rootward.engine.tabular import TabularModel
from rootward.ports import Rows
from verifier_service.kv_admission import Slots
from verifier_service.session import Session


def model(tokens: int = 64) -> TabularModel:
    return TabularModel(5, seed=1, max_positions=24, tree_room=8, block_size=4, max_slots=4, kv_cache_tokens=tokens)


def session(target: TabularModel, number: int, prompt: int, *, fed: int | None = None, uses_drafters: bool = True):
    one = Session(
        number,
        request(f"r{number}", (1,) * prompt),
        Rule.TRAVERSAL,
        DraftMode.SAMPLED,
        frozenset(),
        uses_drafters=uses_drafters,
    )
    if fed is not None:
        one.kv_slot = target.open()
        if fed:
            target.forward([Rows.chain(one.kv_slot, 0, (1,) * fed)])
            target.commit(one.kv_slot, fed - 1, keep_below=False)
    return one


def admits(target: TabularModel, one: Session, running: list[Session]) -> bool:
    slots = Slots(target, 8)
    slots.running = {other.number: other for other in running}
    return slots.admits(one)


@pytest.mark.parametrize("fed", range(10))
def test_room_and_blocks_are_what_the_model_would_take(fed: int) -> None:
    target = model()
    one = session(target, 1, 12, fed=fed)
    room, blocks = Slots(target, 8).held(one)
    assert target.num_blocks - target.num_free_blocks == blocks
    for rows in range(1, 10):
        assert -(-max(0, rows - room) // target.block_size) == blocks_needed(target, one.kv_slot, rows)


def test_a_place_is_promised_with_room_for_the_text_and_one_tree() -> None:
    target = model(tokens=32)  # 8 blocks
    first = session(target, 1, 8, fed=0)  # promised 4 blocks
    assert admits(target, session(target, 2, 8), [first])
    assert not admits(target, session(target, 2, 9), [first])
    assert admits(target, session(target, 2, 16, uses_drafters=False), [first])  # no tree
    filled = session(target, 3, 8, fed=7)  # of its 4 it holds 2
    assert target.num_free_blocks == 6
    assert not admits(target, session(target, 2, 16), [filled])
    assert admits(target, session(target, 2, 8), [filled])


def test_a_single_session_is_admitted_and_none_without_a_slot() -> None:
    target = model(tokens=32)
    assert admits(target, session(target, 1, 24), [])
    for number in range(4):
        session(target, number, 1, fed=0)
    slots = Slots(target, 8)
    slots.waiting.push(session(target, 9, 1))
    assert slots.admit(lambda *_: None) == []
