"""Which local draft a round takes where a session has a draft head and look-up."""

from __future__ import annotations

import pytest
from support.services import verifier_settings

from rootward.core.requests import DraftMode, Rule, Sampling, Speculation, SpeculationMode, Stopping, VerifierRequest
from verifier_service.local_drafts import ASK_OTHER_EVERY, LocalDraft, LocalDrafts, learn
from verifier_service.session import Session
from verifier_service.speculation import RoundResult, SpeculationController

REPEATING, NEW = (5, 6, 7, 8, 5, 6, 7), (1, 2, 3, 4, 5, 6, 7)


def begun(
    prompt: tuple[int, ...] = REPEATING,
    *,
    local_draft: str = "head:here",
    mode: SpeculationMode = SpeculationMode.AUTO,
    drafter: str = "",
    rule: Rule = Rule.TRAVERSAL,
) -> tuple[LocalDrafts, Session]:
    """A session for which every kind of local draft is worth four nodes."""
    settings = verifier_settings(local_draft=local_draft, num_draft_tokens=4)
    wanted = VerifierRequest(
        "r", prompt, Sampling(temperature=1.0), Stopping(50), Speculation(mode, drafter=drafter), seed=1
    )
    session = Session(1, wanted, rule, DraftMode.SAMPLED, frozenset(), uses_drafters=False)
    drafts = LocalDrafts(settings, 10, SpeculationController())
    drafts.attach(session)
    for one in session.local_drafts:
        one.statistics.begin_round = lambda *_: (4, 4)  # type: ignore[method-assign]
    return drafts, session


def names(session: Session) -> list[str]:
    return [one.name for one in session.local_drafts]


def taken(drafts: LocalDrafts, session: Session, **speedups: float) -> str:
    """Name of the draft of the round that begins."""
    for one in session.local_drafts:
        one.statistics.speedup = speedups.get("head" if one.name == "head" else "lookup", 1.0)
        one.length = -1
    assert drafts.plan(session, 4, 1) > 0
    assert session.local is not None
    return session.local.name


def test_a_head_drafts_beside_look_up() -> None:
    assert names(begun()[1]) == ["ngram", "head"]
    assert names(begun(local_draft="ngram+recycling")[1]) == ["ngram+recycling"]
    assert names(begun(local_draft="none")[1]) == []


@pytest.mark.parametrize("drafter", ["head", "ngram+recycling"])
def test_a_request_that_names_a_draft_gets_it_alone(drafter: str) -> None:
    assert names(begun(drafter=drafter)[1]) == [drafter]


def test_a_request_that_requires_trees_has_the_head_alone() -> None:
    assert names(begun(mode=SpeculationMode.REQUIRED)[1]) == ["head"]


def test_a_request_without_speculation_gets_none() -> None:
    assert names(begun(mode=SpeculationMode.DISABLED)[1]) == []


def test_chains_are_drafted_by_the_head_alone() -> None:
    assert names(begun(rule=Rule.BLOCK)[1]) == ["head"]


def test_the_draft_with_the_higher_speed_up_is_asked_first() -> None:
    drafts, session = begun()
    assert taken(drafts, session, lookup=1.5, head=1.2) == "ngram"
    assert taken(drafts, session, lookup=1.1, head=1.2) == "head"


def test_of_several_sessions_the_draft_with_more_tokens_is_asked_first() -> None:
    """The others wait for the head in any case, so that look-up saves no time."""
    drafts, session = begun()
    for one in session.local_drafts:
        one.statistics.active = True
        one.statistics.speedup = {"ngram": 2.0, "head": 1.5}[one.name]
        one.statistics.usual_tokens = {"ngram": 1.3, "head": 1.6}[one.name]
    assert drafts.plan(session, 4, 2) > 0
    assert session.local is not None
    assert session.local.name == "head"


def test_where_look_up_finds_nothing_the_head_drafts() -> None:
    assert taken(*begun(NEW), lookup=1.5, head=1.2) == "head"


def test_the_slower_draft_is_asked_now_and_then() -> None:
    prompt = (REPEATING * 3)[-ASK_OTHER_EVERY:]
    assert taken(*begun(prompt), lookup=1.1, head=1.2) == "ngram"


def test_a_round_is_planned_once() -> None:
    drafts, session = begun()
    assert taken(drafts, session, lookup=1.5) == "ngram"
    for one in session.local_drafts:
        one.statistics.speedup = {"ngram": 1.0, "head": 2.0}[one.name]
    assert drafts.plan(session, 4, 1) > 0
    assert session.local is not None
    assert session.local.name == "ngram"


def test_a_round_updates_the_statistics_of_the_draft_that_made_its_tree() -> None:
    drafts, session = begun()
    assert taken(drafts, session, lookup=1.5) == "ngram"
    drafts.launch(session, None)
    seen: dict[str, RoundResult] = {}

    def note(one: LocalDraft) -> None:
        one.statistics.add = lambda _, result: seen.update({one.name: result})  # type: ignore[method-assign]

    for one in session.local_drafts:
        note(one)
    session.local_drafts[0].seconds = 0.001
    learn(session, 3, (1, 2), draft_s=0.0, load=4, speed=2.0)
    assert seen == {"ngram": RoundResult(3, 3, (1, 2), 0.002), "head": RoundResult()}


def test_a_look_up_that_finds_nothing_lowers_the_expected_number_of_trees() -> None:
    drafts, session = begun(NEW)
    assert taken(drafts, session, lookup=1.5) == "head"
    drafts.launch(session, None)
    learn(session, 2, (1,), draft_s=0.001, load=1, speed=1.0)
    look_up, head = (one.statistics for one in session.local_drafts)
    assert look_up.expected_trees(8) == 1.0
    assert head.expected_trees(8) == 8.0
    assert (look_up.num_rounds, head.num_rounds) == (0, 1)
