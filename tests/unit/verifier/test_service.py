"""What is decided when a round begins stays decided while its tree waits."""

from __future__ import annotations

import pytest
from support.services import request, tabular_pair, verifier_of

from rootward.clock import Watchdog
from rootward.core.frames import HelloAck
from rootward.core.requests import DraftMode, Rule, SpeculationMode
from rootward.errors import StaleEpoch, Unavailable
from verifier_service.drafter_link import Link
from verifier_service.kv_admission import MAX_SEEDS_REMEMBERED
from verifier_service.session import Session
from verifier_service.speculation import RoundResult


@pytest.mark.parametrize(("epoch", "rule"), [(3, Rule.MATCH), (4, Rule.TRAVERSAL)])
def test_who_is_refused_for_an_old_epoch_learns_the_newest_one(epoch: int, rule: Rule) -> None:
    target, _ = tabular_pair()
    admission = verifier_of(target, {}).admission
    admission.fence(request("x", epoch=4, rule=rule), rule)
    with pytest.raises(StaleEpoch) as refused:
        admission.fence(request("x", epoch=epoch, rule=rule), rule)
    assert refused.value.metadata["epoch"] == "4"


def test_no_seed_is_used_twice_in_an_epoch_whatever_came_between() -> None:
    """Its coins would be used twice, and a drafter may have heard of their verdicts."""
    target, _ = tabular_pair()
    admission = verifier_of(target, {}).admission
    for seed in (1, 2, 3):
        admission.fence(request("x", epoch=4, seed=seed), Rule.TRAVERSAL)
    for seed in (1, 2, 3):
        with pytest.raises(StaleEpoch):
            admission.fence(request("x", epoch=4, seed=seed), Rule.TRAVERSAL)
    for seed in range(4, 4 + MAX_SEEDS_REMEMBERED - 3):
        admission.fence(request("x", epoch=4, seed=seed), Rule.TRAVERSAL)
    with pytest.raises(StaleEpoch) as refused:  # more than are remembered
        admission.fence(request("x", epoch=4, seed=99), Rule.TRAVERSAL)
    assert refused.value.metadata["epoch"] == "4"
    admission.fence(request("x", epoch=5, seed=1), Rule.TRAVERSAL)


def test_nobody_learns_the_epoch_of_a_request_that_runs() -> None:
    """It could be ended by a higher one."""
    target, _ = tabular_pair()
    admission = verifier_of(target, {}).admission
    running = request("x", epoch=4)
    admission.fence(running, Rule.MATCH)
    admission.live["x"] = Session(1, running, Rule.MATCH, DraftMode.COUPLED, frozenset())
    with pytest.raises(StaleEpoch) as refused:
        admission.fence(request("x", epoch=3), Rule.MATCH)
    assert "epoch" not in refused.value.metadata


def test_neither_load_nor_other_sessions_change_a_round_that_has_begun() -> None:
    target, _ = tabular_pair()
    service = verifier_of(target, {}, num_draft_tokens=8)
    link = Link("d", service._hello, lambda: None)
    service.pool.links.append(link)
    link.ack = HelloAck("d", 7, "", 5, 64, tuple(DraftMode), 4, 64)
    controller = service.engine.rounds.controller
    controller.step_time.add(1, 1.0)  # rows cost nothing, as far as is known
    statistics = controller.of("shared with other sessions")
    wanted = request(mode=SpeculationMode.AUTO)
    one = Session(1, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset(), statistics=statistics)
    one.fed = len(one.tokens) - 1

    def begun(session: Session) -> int | None:
        service.engine.running[session.number] = session
        service.engine._begin_rounds()
        return session.round.max_nodes

    statistics.next_probe = statistics.num_probes = 99
    controller.plan({statistics: 1}, most=8)
    assert begun(one) == 8
    while statistics.uses_trees(1):  # other rounds show that trees lose
        statistics.add(1, RoundResult(8, 8, (), 9.0))
        controller.plan({statistics: 1}, most=8)
    service.engine.rounds.count = lambda rows: setattr(service.engine.rounds, "nodes", 1)  # type: ignore[method-assign]
    assert begun(one) == 8
    one.round.max_nodes = None  # the next round
    assert begun(one) == 0


async def test_a_verifier_whose_step_does_not_end_tells_its_callers() -> None:
    """They go on with another one, also where no supervisor restarts it."""
    target, _ = tabular_pair()
    async with verifier_of(target, {}) as service:
        service.engine.watchdog = Watchdog(limit_s=0.0)
        await service.get_info()
        with service.engine.watchdog.step(), pytest.raises(Unavailable, match="step"):
            await service.get_info()
