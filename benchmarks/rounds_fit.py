"""The worker model of the simulation from measured rounds: plain least squares, and what the simulation makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot

from benchmarks.scaling import Plan, Pool, Work

SIMULATED_ROUNDS = 400  # of each session
# Widths that tell how many draft at once: narrower than alone, wider than the one row that every session gets.
CROWDED, LEAST_WIDTH = 0.9, 1.2


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
    """Seconds of a round with one session: drafting, the rest; what each further session on the drafter adds to drafting, as a share.
    shared: how many times longer the rest is with two sessions, which take turns at the verifier; verify_crowd: what each further one adds
    to that. Rows that a session fills while it drafts; the share of a drafter's sessions that draft at the same time; rows of a forward;
    the share of a time that is the same every time."""

    draft_s: float
    draft_crowd: float
    verify_s: float
    shared: float
    verify_crowd: float
    width: float
    together: float
    rows: int
    fixed: float

    def work(self, verifier_sessions: int) -> Work:
        """For the simulation, where each verifier serves so many sessions."""
        return Work(
            draft_s=self.draft_s,
            draft_fixed=self.fixed,
            draft_crowd=self.draft_crowd,
            verify_s=self.verify_s * (1 if verifier_sessions == 1 else self.shared * self._crowded(verifier_sessions)),
            verify_fixed=self.fixed,
            rows=self.rows,
            width=self.width,
            together=self.together,
        )

    def _crowded(self, verifier_sessions: int) -> float:
        return 1 + self.verify_crowd * (verifier_sessions - 2)


@dataclass(frozen=True, slots=True)
class Prediction:
    round_s: float
    stall_s: float
    demand: float


def fitted(points: Sequence[Point], rows: int) -> Fit:
    """From points of one drafter and one verifier; one session and at least two must be among them."""
    alone = next(p for p in points if p.sessions == 1)
    draft_s, draft_crowd = _line(points, lambda p: p.draft_s, 1)
    rest_s, verify_crowd = _line([p for p in points if p.sessions > 1], lambda p: p.rest_s, 2)
    width = alone.row_s / alone.draft_s
    dealt = [p for p in points if LEAST_WIDTH < p.row_s / p.draft_s < CROWDED * width]
    together = [rows / (p.sessions * p.row_s / p.draft_s) for p in dealt]
    # Independent parts of which a share is exponential: their variances add up.
    free = [p.spread * p.round_s / hypot(p.draft_s, p.rest_s) for p in points]
    fixed = 1 - min(1.0, sum(free) / len(free))
    share = sum(together) / len(together) if together else 0.0
    shared = rest_s / alone.rest_s
    return Fit(draft_s, draft_crowd, alone.rest_s, shared, verify_crowd, width, share, rows, fixed)


def _line(points: Sequence[Point], value: Callable[[Point], float], first: int) -> tuple[float, float]:
    """(with `first` sessions, share that each further one adds), by least squares of relative errors."""
    weights = [1 / value(p) ** 2 for p in points]
    x, y = [p.sessions - first for p in points], [value(p) for p in points]
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    across = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    along = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    slope = max(0.0, across / along) if along else 0.0
    least = mean_y - slope * mean_x
    return least, slope / least


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
