"""What is decided when a round begins stays decided while its tree waits."""

from __future__ import annotations

from support.services import request, tabular_pair, verifier_of

from rootward.core.requests import Law, Rule, SpeculationMode
from verifier_service.gain import Gain, Pace
from verifier_service.sessions import Session


def test_neither_load_nor_other_sessions_change_a_round_that_has_begun() -> None:
    target, _ = tabular_pair()
    service = verifier_of(target, {}, num_draft_tokens=8)
    plain = Pace()
    for _ in range(3):
        plain.add(1, 0.01)
    gain = Gain(plain)  # shared with other sessions
    one = Session(1, request(mode=SpeculationMode.AUTO), Rule.TRAVERSAL, Law.SAMPLED, frozenset(), gain=gain)
    one.fed = len(one.tokens) - 1
    assert service._view(one, 0.0, nodes=8).cap == 8
    while gain.pays:  # another session's rounds show that trees lose
        gain.add(1, 1.0, with_tree=True)
    assert service._view(one, 0.0, nodes=1).cap == 8
    one.cap = None  # the next round
    assert service._view(one, 0.0, nodes=8).cap == 0
