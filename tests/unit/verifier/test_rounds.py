"""What a round is given and what is learned from it: settled before anything that the next round may keep has arrived."""

from __future__ import annotations

import math

import pytest
from support.services import verifier_settings

from rootward.core.frames import Hello
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode, Stopping, VerifierRequest
from verifier_service.draft_pace import DraftPace
from verifier_service.drafter_link import Link
from verifier_service.rounds import Rounds
from verifier_service.runner import Outcome
from verifier_service.scheduler import LATE, Plan
from verifier_service.session import Draft, Session
from verifier_service.speculation import RoundResult, Statistics
from verifier_service.step_time import StepTime


class Pool:
    """What rounds tell the pool."""

    up = ("d",)

    def __init__(self) -> None:
        self.missed: list[bool] = []

    def record_round(self, session: Session, *, missed: bool, num_nodes: int, tokens: int) -> None:
        self.missed.append(missed)

    def close(self, session: Session, reason: str) -> None:
        pass


@pytest.mark.parametrize("came_to_rest", [False, True])
@pytest.mark.parametrize("heard", [False, True])
def test_growth_that_arrives_while_a_step_runs_changes_no_statistics(heard: bool, came_to_rest: bool) -> None:
    """Growth of that time may be kept for the next round. Whether it came to rest depends on its values, and what is learned decides
    that round's cap (algorithms.md 6.1, L2)."""
    wanted = VerifierRequest("r", (1, 2), stopping=Stopping(9))
    session = Session(1, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset())
    pool = Pool()
    rounds = Rounds(verifier_settings(num_draft_tokens=16, draft_wait_ms=200), pool, {1: session})  # type: ignore[arg-type]  # all that is asked of it
    session.statistics, session.round.max_nodes, session.round.target_nodes = rounds.statistics(session), 4, 4
    draft = session.draft = Draft(None, 1, LivingTree(2, 0, vocab_size=5), has_growth=heard)
    rounds.start_round_timer(session)
    rounds.on_launch(session, 0)
    draft.has_growth, draft.at_rest = True, came_to_rest
    before = session.statistics.tokens(4)
    assert rounds.ended(session, Outcome((3,), 0)) is heard  # before the first growth nobody waits
    assert pool.missed == [True]  # though a drafter that never says anything must be found out
    assert (session.statistics.tokens(4) < before) is heard  # a wait in vain is a cost of trees


@pytest.mark.parametrize("wanted", [0, 4])
@pytest.mark.parametrize("kind", ["at rest", "growing", "orphan", "with a node"])
def test_a_round_is_empty_if_a_tree_at_rest_had_no_node_for_it(kind: str, wanted: int) -> None:
    """A tree that is not wanted rests without nodes as well, and so does that of a drafter that was lost."""
    request = VerifierRequest("r", (1, 2), stopping=Stopping(9))
    session = Session(1, request, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset())
    rounds = Rounds(verifier_settings(num_draft_tokens=16, draft_wait_ms=200), Pool(), {1: session})  # type: ignore[arg-type]  # all that is asked of it
    session.round.max_nodes = session.round.target_nodes = wanted
    draft = session.draft = Draft(None, 1, LivingTree(2, 0, vocab_size=5), has_growth=True)
    draft.at_rest, draft.closed = kind != "growing", kind == "orphan"
    rounds.on_launch(session, 1 if kind == "with a node" else 0)
    draft.at_rest = not draft.at_rest  # what arrives while the step runs does not count
    assert session.round.empty is (kind == "at rest" and wanted > 0)


def test_the_last_rounds_of_a_request_are_not_what_is_usual() -> None:
    step_time = StepTime(dict.fromkeys((1, 2, 4, 8, 16), 1.0))
    wanted = VerifierRequest("r", (1, 2), stopping=Stopping(40))
    session = Session(1, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset())
    rounds = Rounds(verifier_settings(num_draft_tokens=16, draft_wait_ms=200), Pool(), {1: session}, step_time)  # type: ignore[arg-type]
    rounds.count(64)
    session.statistics = rounds.statistics(session)
    session.fed = 1
    rounds.plan()
    usual = session.statistics.usual_nodes
    assert usual > 3
    session.tokens += [3] * 37
    rounds.plan_round(session)
    assert 0 < (session.round.max_nodes or 0) < usual == session.statistics.usual_nodes


@pytest.mark.parametrize("heard", [False, True])
def test_a_session_that_requires_trees_stalls_whenever_none_came(heard: bool) -> None:
    wish = Speculation(SpeculationMode.REQUIRED)
    session = Session(1, VerifierRequest("r", (1, 2), speculation=wish), Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset())
    rounds = Rounds(verifier_settings(num_draft_tokens=16, draft_wait_ms=200), Pool(), {1: session})  # type: ignore[arg-type]  # all that is asked of it
    session.round.max_nodes = session.round.target_nodes = 4
    session.draft = Draft(None, 1, LivingTree(2, 0, vocab_size=5), has_growth=heard)
    before = session.statistics.tokens(4)
    rounds.start_round_timer(session)
    rounds.on_launch(session, 0)
    assert rounds.ended(session, Outcome((3,), 0))
    assert session.statistics.tokens(4) == before  # which says nothing of the nodes of trees that come


def living(*, kept: int, cap: int, next_s: float, rule: Rule = Rule.TRAVERSAL) -> tuple[Rounds, Session, Draft]:
    """A session whose last commit kept a chain of nodes; the next growth is due after next_s, a step takes 60 ms."""
    step_time = StepTime({1: 0.06, 64: 0.06})
    session = Session(1, VerifierRequest("r", (1, 2), stopping=Stopping(99)), rule, DraftMode.COUPLED, frozenset())
    rounds = Rounds(verifier_settings(num_draft_tokens=16, draft_wait_ms=200), Pool(), {1: session}, step_time)  # type: ignore[arg-type]
    tree = LivingTree(2, 0, vocab_size=5)
    parent = 0
    for _ in range(kept):
        parent = tree.draw(parent, 1, sampled=False)
    session.statistics, session.round.max_nodes, session.round.target_nodes = rounds.statistics(session), cap, cap
    link = Link("d", lambda: Hello("v", 1, "", 5, 64), lambda: None)
    link.pace = DraftPace(next_s)
    link.pace.on_more_growth(0.001, 1, cap)
    draft = session.draft = Draft(link, 1, tree, has_growth=True, wanted=cap)
    rounds.start_round_timer(session)
    return rounds, session, draft


def test_a_tree_is_due_by_the_pace_of_trees_of_its_size() -> None:
    """Otherwise the others stop waiting for it too early, after trees of another size."""
    rounds, session, draft = living(kept=0, cap=6, next_s=0.01)
    draft.rerooted_s = session.round.committed_s
    for _ in range(30):
        draft.link.pace.on_more_growth(0.005, 1, size=6)
        draft.link.pace.on_more_growth(0.005, 4, size=16)
    assert rounds.due(session, draft.rerooted_s)[0] == pytest.approx(0.01 + 5 * 0.005, rel=0.01)


def test_kept_nodes_are_launched_at_once_where_growth_is_slow_and_the_drafter_gets_the_budget() -> None:
    rounds, session, draft = living(kept=4, cap=8, next_s=0.03)
    assert rounds.patience_s(session) == 0.0
    assert rounds.budget(session, draft) == 4


@pytest.mark.parametrize(("kept", "next_s"), [(4, 0.0), (1, 0.005), (0, 0.03)])
def test_where_more_is_near_or_nothing_was_kept_the_whole_tree_is_asked_for(kept: int, next_s: float) -> None:
    rounds, session, draft = living(kept=kept, cap=8, next_s=next_s)
    assert rounds.patience_s(session) > 0.0
    assert rounds.budget(session, draft) == 8


def test_growth_that_has_begun_is_waited_for_whatever_was_kept() -> None:
    rounds, session, draft = living(kept=4, cap=8, next_s=0.03)
    draft.has_current_growth = True
    assert rounds.patience_s(session) > 0.06


def test_a_round_launched_with_kept_nodes_is_no_observation_of_later_nodes() -> None:
    rounds, session, draft = living(kept=4, cap=8, next_s=0.03)
    assert rounds.budget(session, draft) == 4
    rounds.on_launch(session, 4)
    rounds.ended(session, Outcome((1, 1, 3), 4, path=(1, 2)))
    observed = Statistics()
    observed.add(1, RoundResult(4, 4, (1, 2)))
    assert session.statistics.tokens(8) == observed.tokens(8) != Statistics().tokens(8)


def test_what_is_launched_with_what_was_kept_stays_ready_whatever_comes_then() -> None:
    rounds, session, draft = living(kept=4, cap=8, next_s=0.03)
    assert rounds.budget(session, draft) == 4
    draft.has_current_growth = True  # the drafter goes on below this root meanwhile
    assert rounds.patience_s(session) == 0.0
    rounds.plan_round(session)
    assert not session.round.launch_immediately


def test_what_has_come_beyond_enough_is_verified_as_far_as_its_rows_are_worth_it() -> None:
    rounds, session, _ = living(kept=12, cap=8, next_s=0.03)
    rounds.count(64)
    # Steps of one to 64 rows cost the same: only the wait for nodes is dear.
    session.statistics.add(1, RoundResult(8, 8, (1, 2, 3), 0.1))
    session.fed, session.statistics.num_probes, session.statistics.next_probe = 1, 99, 99
    rounds.plan()
    rounds.plan_round(session)
    assert 0 < session.round.target_nodes < 12 < (session.round.max_nodes or 0)


@pytest.mark.parametrize(("has_current_growth", "takes_s"), [(False, 0.03 + 0.001 * 3), (True, 0.05 + 0.001 * 4)])
def test_a_tree_is_due_by_the_pace_of_its_drafter(has_current_growth: bool, takes_s: float) -> None:
    rounds, session, draft = living(kept=4, cap=8, next_s=0.03)
    assert rounds.due(session, 100.0) == (0.0, 0.0)  # nothing was committed yet: nobody knows since when it is awaited
    draft.rerooted_s, draft.last_growth_s, draft.has_current_growth = 100.0, 100.05, has_current_growth
    assert rounds.due(session, 100.0) == pytest.approx((takes_s, LATE * takes_s))
    assert rounds.due(session, 100.02) == pytest.approx((takes_s - 0.02, LATE * takes_s - 0.02))
    assert rounds.due(session, 101.0) == pytest.approx((takes_s - 1.0, 0.0))
    session.round.target_nodes = 4
    assert rounds.due(session, 100.0) == (0.0, 0.0)


def test_a_wait_for_others_is_no_cost_of_growth_and_has_one_end() -> None:
    rounds, session, draft = living(kept=8, cap=8, next_s=0.03)
    draft.at_rest = True
    rounds.idle(0.010)  # while it grew
    rounds.note_ready(session)
    rounds.planned(Plan(wait_s=0.03, held=True), 5.0)
    rounds.idle(0.030)
    assert rounds.hold_s(5.03) == pytest.approx(0.0)
    rounds.planned(Plan(wait_s=0.02, held=True), 5.02)  # later news
    assert rounds.hold_s(5.03) == pytest.approx(0.0)
    rounds.planned(Plan(preempt=(7,)), 5.03)  # for the step that ends the wait
    assert rounds.hold_s(5.03) == pytest.approx(0.0)
    rounds.on_launch(session, 8)
    rounds.ended(session, Outcome((3,), 8))
    assert session.statistics.draft_wait(8) == pytest.approx(0.010)
    rounds.planned(Plan(verify=((1, 8),)), 5.03)
    assert rounds.hold_s(5.03) == math.inf
