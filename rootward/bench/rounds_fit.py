"""The worker model of the simulation from measured rounds: plain least squares, and what the simulation makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot

from rootward.bench.scaling import Plan, Pool, Work

SIMULATED_ROUNDS = 400  # of each session


@dataclass(frozen=True, slots=True)
class Point:
    """Means of a round in seconds, at so many sessions on so many drafters. rate: tokens per second and session; spread: of a round's time,
    as a share."""

    drafters: int
    sessions: int
    round_s: float
    draft_s: float
    row_s: float
    stall_s: float
    rate: float
    tokens: float
    spread: float

    @property
    def rest_s(self) -> float:
        return max(0.0, self.round_s - self.draft_s - self.stall_s)

    @property
    def demand(self) -> float:
        """D = N·A/R0, in rows."""
        return self.sessions * self.row_s / (self.round_s - self.stall_s)


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of a round with one session; what each further one on the same drafter, or verifier, adds, as a share; rows that one session
    fills while it drafts, and by what each further one at the drafter narrows that, as a share; rows of a forward; the share of a time that
    is the same every time."""

    draft_s: float
    draft_crowd: float
    verify_s: float
    verify_crowd: float
    width: float
    width_crowd: float
    rows: int
    fixed: float

    def work(self, verifier_sessions: int) -> Work:
        """For the simulation, where each verifier serves so many sessions."""
        return Work(
            draft_s=self.draft_s,
            draft_fixed=self.fixed,
            draft_crowd=self.draft_crowd,
            verify_s=self.verify_s * (1 + self.verify_crowd * (verifier_sessions - 1)),
            verify_fixed=self.fixed,
            rows=self.rows,
            width=self.width,
            width_crowd=self.width_crowd,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    round_s: float
    stall_s: float
    demand: float


def fitted(points: Sequence[Point], rows: int) -> Fit:
    """From points of one drafter and one verifier."""
    draft_s, draft_crowd = _line(points, lambda p: p.draft_s)
    verify_s, verify_crowd = _line(points, lambda p: p.rest_s)
    narrow, width_crowd = _line(points, lambda p: p.draft_s / p.row_s)
    # Independent parts of which a share is exponential: their variances add up.
    free = [p.spread * p.round_s / hypot(p.draft_s, p.rest_s) for p in points]
    fixed = 1 - min(1.0, sum(free) / len(free))
    return Fit(draft_s, draft_crowd, verify_s, verify_crowd, 1 / narrow, width_crowd, rows, fixed)


def _line(points: Sequence[Point], value: Callable[[Point], float]) -> tuple[float, float]:
    """(with one session, share that each further one adds), by least squares of relative errors."""
    weights = [1 / value(p) ** 2 for p in points]
    x, y = [p.sessions - 1 for p in points], [value(p) for p in points]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    across = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    along = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    slope = max(0.0, across / along) if along else 0.0
    first = mean_y - slope * mean_x
    return first, slope / first


def predicted(fit: Fit, drafters: int, sessions: int, seed: int = 1) -> Prediction:
    """A round by the simulation: fixed pods, a fixed number of sessions, one verifier."""
    work = fit.work(sessions)
    end_s = SIMULATED_ROUNDS * (work.draft_s * (1 + work.draft_crowd * sessions) + work.verify_s)
    plan = Plan(lambda now_s: sessions, end_s=end_s, pods=drafters, scrape_s=end_s / 4)
    pool = Pool(work, plan, None, None, seed)
    pool.run()
    seen, rounds = pool.counters, max(1, pool.counters.rounds)
    base_s = (seen.round_s - seen.stall_s) / rounds
    return Prediction(seen.round_s / rounds, seen.stall_s / rounds, sessions * seen.row_s / seen.growths / base_s)
