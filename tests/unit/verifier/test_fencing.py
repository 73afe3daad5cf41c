"""Epochs of requests, when there are more requests than epochs are remembered."""

from __future__ import annotations

import pytest

import verifier_service.kv_admission
from rootward.core.requests import DraftMode, Rule, VerifierRequest
from rootward.engine.tabular import TabularModel
from rootward.errors import DuplicateRequest, StaleEpoch
from verifier_service.kv_admission import Admission
from verifier_service.session import Session
from verifier_service.settings import VerifierSettings


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.MATCH])
def test_a_running_request_is_never_forgotten(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it, and one that is older, must not end it."""
    monkeypatch.setattr(verifier_service.kv_admission, "MAX_EPOCHS_REMEMBERED", 1)
    admission = Admission(TabularModel(5, seed=1).info, VerifierSettings(model="tabular:vocab=5"))
    long = VerifierRequest("long", (1, 2), epoch=2, seed=5)
    admission.fence(long, rule)
    session = admission.live["long"] = Session(1, long, rule, DraftMode.SAMPLED, frozenset())
    admission.fence(VerifierRequest("other", (1, 2)), rule)
    with pytest.raises(DuplicateRequest):
        admission.fence(long, rule)
    with pytest.raises(StaleEpoch):
        admission.fence(VerifierRequest("long", (1, 2), epoch=1), rule)
    assert not session.done
    admission.fence(VerifierRequest("long", (1, 2), epoch=3), rule)
    assert session.done
