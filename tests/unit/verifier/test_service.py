"""What is decided when a round begins stays decided while its tree waits."""

from __future__ import annotations

from support.services import drafter_of, request, tabular_pair, verifier_of

from rootward.core.frames import HelloAck
from rootward.core.requests import DraftMode, Rule, SpeculationMode
from verifier_service.cost import WARM, Machine
from verifier_service.gain import Gain, Spent
from verifier_service.sessions import Session


def test_neither_load_nor_other_sessions_change_a_round_that_has_begun() -> None:
    target, _ = tabular_pair()
    service = verifier_of(target, {"d": drafter_of(tabular_pair()[1])}, num_draft_tokens=8)
    service.pool.links[0].ack = HelloAck("d", 7, "", 5, 64, tuple(DraftMode), 4, 64)
    machine = Machine()
    for _ in range(WARM):
        machine.stepped(1, 1.0, trees=False)  # rows cost nothing, as far as is known
    gain = Gain(machine)  # shared with other sessions
    one = Session(1, request(mode=SpeculationMode.AUTO), Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset(), gain=gain)
    one.fed = len(one.tokens) - 1
    assert service._view(one, 0.0).cap == 8
    while gain.uses_trees(1):  # other rounds show that trees lose
        gain.add(1, Spent(1, 10.0, 9.0, cap=8))
        gain.nodes(1, 8, 1)
    service.rounds.nodes = 1
    assert service._view(one, 0.0).cap == 8
    one.cap = None  # the next round
    assert service._view(one, 0.0).cap == 0
