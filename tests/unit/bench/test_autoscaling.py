"""The simulation: drafters follow a step of load times ten and back, at what cost, and what does not work."""

from dataclasses import replace
from functools import lru_cache

import pytest

from benchmarks import autoscaling
from benchmarks.autoscaling import Plan, Pool, Work

WORK = Work()


def step(now_s: float) -> int:
    return 100 if 300 <= now_s < 800 else 10


@lru_cache
def outcome(name: str):
    scheme = next((s for s in autoscaling.schemes(WORK) if s.name == name), None) or autoscaling.fixed(int(name))
    return autoscaling.run(replace(scheme, pods=1) if scheme.signal else scheme, WORK, 1, step, 1650.0)


def test_demand_goes_up_once_and_down_once_to_the_optimum():
    seen = outcome("D = N·A/R0")
    optimum = 9  # 100 · 0.2 / 0.8 = 25 rows; 25 / 2.8
    assert max(seen.wanted) in (optimum, optimum + 1)
    assert seen.swings <= 1
    assert seen.wanted[-1] <= 2
    late = [t for t, r in zip(seen.times, seen.ready, strict=True) if 300 <= t < 800 and r < optimum - 1]
    assert max(late) <= 390  # pod start, scrapes and syncs included


def test_the_guards_cost_a_brief_overshoot_and_no_oscillation():
    seen = outcome("D + both guards (default)")
    assert seen.swings <= 1
    assert seen.pod_s < 1.2 * outcome("D = N·A/R0").pod_s


def test_cheaper_than_a_fixed_pool_that_waits_as_little():
    """Rounds are what users get: within a few per cent of a pool for the peak, for much less."""
    seen, peak = outcome("D + both guards (default)"), outcome("9")
    assert seen.rounds > 0.9 * peak.rounds
    assert seen.pod_s < 0.75 * peak.pod_s
    assert outcome("2").rounds < 0.6 * peak.rounds


def test_rows_busy_alone_is_late():
    seen, good = outcome("rows busy alone"), outcome("D = N·A/R0")
    assert seen.short_s(9, 100) > 2 * good.short_s(9, 100)


def test_queues_overshoot_and_flap():
    seen = outcome("mean queue time, S/10")
    assert max(seen.wanted) > 2 * 9


def test_sessions_that_never_move_leave_new_drafters_idle():
    seen, good = outcome("D, sessions pinned"), outcome("D = N·A/R0")
    assert max(seen.wanted) == max(good.wanted)
    assert seen.stall_ms > 10 * good.stall_ms
    assert seen.rounds < 0.75 * good.rounds


@pytest.mark.parametrize("overlap", [False, True])
def test_no_round_is_lost_when_drafters_come_and_go(overlap):
    """Conservation: every session that ever began is running or has ended, rows are free or busy, whatever happened."""
    pool = Pool(Work(overlap=overlap), Plan(lambda t: 20 if t < 200 else 0, end_s=300.0), None, None, 3)
    sizes = iter([2, 6, 1, 0, 0, 3, 5, 1, 4, 2, 1, 1, 2, 3, 2, 1, 1, 1, 1, 1, 1, 1])
    scrape = pool.scrape

    def scrape_and_resize() -> None:
        scrape()
        pool._resize(next(sizes))
        for pod in pool.pods:
            pod.ready_s = min(pod.ready_s, pool.now_s)

    pool.scrape = scrape_and_resize  # type: ignore[method-assign]
    seen = pool.run()
    assert pool.num_sessions == 0
    assert seen.rounds > 20 * 200 / 2
    assert all(pod.busy == len(pod.queue) == pod.sessions == 0 for pod in pool.pods)
