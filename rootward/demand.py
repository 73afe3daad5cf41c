"""Demand for drafters in rows of a pool: the counters of workers, and the demand that follows (closed network, operational laws).

    N    sessions that would take drafts now, with or without a drafter                          verifiers, a gauge
    A    row-seconds of wanted growth per round: rows × time in draft forwards, no queueing      drafters
    R0   mean time of rounds with a tree − mean stall: the part of waiting that was queueing     verifiers
    D    N · A / R0, rows that would be busy without queueing

N is a signal of its own: a drafter has slots for a fixed number of trees (memory for their texts), however few rows they fill.

Rounds of sessions without a tree, for want of a drafter or of a slot there, are shorter. They are counted apart and stand in for R0
only while no round has a tree; it is then no less than what such rounds took last.

All but N and the sizes are cumulative within one incarnation of a worker. They travel twice: as metrics (`DemandCollector`) and in
heartbeats (`counters()`, the same names without prefix), so that a gateway computes the signals from two beats without a Prometheus.
Wanted: growth up to the node budget of a round. What grows beyond it (`ahead`) fills idle rows and is no demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

STALL_LIMIT = 0.15  # 1.5 × the objective: bounds what one look at the stall can ask for

Counters = Mapping[str, float]


@dataclass(slots=True)
class VerifierDemand:
    """Counters of a verifier for one pool."""

    sessions: int = 0  # N, now
    rounds: int = 0
    round_s: float = 0.0
    stall_s: float = 0.0
    prior_row_s: float = 0.0  # A before any drafter has reported
    plain_rounds: int = 0
    plain_s: float = 0.0

    def add(self, round_s: float, stall_s: float) -> None:
        """A round with a tree was committed `round_s` after the one before; `stall_s` of it was queueing at the drafter."""
        self.rounds += 1
        self.round_s += round_s
        self.stall_s += min(stall_s, round_s)

    def add_plain(self, round_s: float) -> None:
        """A round of a session that would have taken a tree."""
        self.plain_rounds += 1
        self.plain_s += round_s

    def counters(self) -> dict[str, float]:
        return {
            "speculating_sessions": self.sessions,
            "round_seconds_count": self.rounds,
            "round_seconds_sum": self.round_s,
            "draft_stall_seconds_count": self.rounds,
            "draft_stall_seconds_sum": self.stall_s,
            "draft_prior_row_seconds": self.prior_row_s,
            "plain_round_seconds_count": self.plain_rounds,
            "plain_round_seconds_sum": self.plain_s,
        }


@dataclass(slots=True)
class DrafterDemand:
    """Counters of a drafter. rows: B, the rows of one draft forward."""

    rows: int
    wanted_s: float = 0.0  # row-seconds
    ahead_s: float = 0.0
    growths: int = 0  # rounds grown for
    compute_s: float = 0.0  # in draft forwards, summed over those rounds

    def level(self, wanted: int, ahead: int, seconds: float) -> None:
        """A draft forward took `seconds`; `wanted` of its rows were in the budget of a round, `ahead` beyond it."""
        self.wanted_s += wanted * seconds
        self.ahead_s += ahead * seconds

    def round(self, compute_s: float) -> None:
        """A commit ended the growth for one round, which took `compute_s` in draft forwards."""
        self.growths += 1
        self.compute_s += compute_s

    def counters(self) -> dict[str, float]:
        return {
            "drafter_rows": self.rows,
            "draft_row_seconds_wanted": self.wanted_s,
            "draft_row_seconds_ahead": self.ahead_s,
            "draft_compute_seconds_count": self.growths,
            "draft_compute_seconds_sum": self.compute_s,
        }


@dataclass(frozen=True, slots=True)
class Reading:
    """Two heartbeats of one incarnation of a worker, the older one first."""

    old: Counters
    new: Counters

    def increase(self, name: str) -> float:
        return max(0.0, self.new.get(name, 0.0) - self.old.get(name, 0.0))

    def now(self, name: str) -> float:
        return self.new.get(name, 0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a round with a tree: row_s is A, base_s is R0; None: no such round was seen. The caller of `signals` keeps it."""

    row_s: float | None = None
    base_s: float | None = None


UNKNOWN = Cost()


@dataclass(frozen=True, slots=True)
class Signals:
    """The signals for an autoscaler. None means unknown, which is not 0."""

    demand: float | None = None  # D, in rows
    rows: float | None = None  # share of rows busy with wanted growth
    stall: float | None = None  # share of the rounds' time, limited
    sessions: float | None = None  # N, each of which needs a slot
    cost: Cost = UNKNOWN


def signals(
    verifiers: Iterable[Reading], drafters: Iterable[Reading], seconds: float, remembered: Cost = UNKNOWN
) -> Signals:
    """The signals of one pool, from beats `seconds` apart. remembered: the cost as it was when drafters last reported."""
    verifiers = list(verifiers)
    drafters = list(drafters)
    if not verifiers:
        return Signals(cost=remembered)
    sessions = sum(v.now("speculating_sessions") for v in verifiers)
    rounds = _increase(verifiers, "round_seconds_count")
    round_s = _increase(verifiers, "round_seconds_sum")
    stall_s = _increase(verifiers, "draft_stall_seconds_sum")
    wanted_s = _increase(drafters, "draft_row_seconds_wanted")
    growths = _increase(drafters, "draft_compute_seconds_count")
    prior = max(v.now("draft_prior_row_seconds") for v in verifiers)
    base_s = (round_s - stall_s) / rounds if rounds else None
    cost = Cost(wanted_s / growths if growths else remembered.row_s, base_s or remembered.base_s)
    if not base_s and (plain := _increase(verifiers, "plain_round_seconds_count")):
        base_s = max(_increase(verifiers, "plain_round_seconds_sum") / plain, cost.base_s or 0.0)
    row_s = cost.row_s or prior
    demand = sessions * row_s / base_s if row_s and base_s else None
    rows = sum(d.now("drafter_rows") for d in drafters)
    return Signals(
        demand=demand if sessions else 0.0,
        rows=wanted_s / seconds / rows if rows and seconds > 0 else 0.0,
        stall=min(stall_s / round_s, STALL_LIMIT) if round_s else 0.0,
        sessions=sessions,
        cost=cost,
    )


def _increase(readings: Iterable[Reading], name: str) -> float:
    return sum(reading.increase(name) for reading in readings)


_FAMILIES = {  # metric → its type, its meaning; names of counters begin with it
    "speculating_sessions": ("gauge", "Sessions that would take drafts now."),
    "round_seconds": ("summary", "Time from commit to commit of a session with a tree."),
    "plain_round_seconds": ("summary", "The same of a session that would take drafts and has no tree."),
    "draft_stall_seconds": ("summary", "Part of a round that was queueing at the drafter."),
    "draft_prior_row_seconds": ("gauge", "Row-seconds of a round before any drafter reported."),
    "drafter_rows": ("gauge", "Rows of one draft forward."),
    "draft_row_seconds": ("counter", "Rows times time in draft forwards."),
    "draft_compute_seconds": ("summary", "Time in draft forwards of one round's growth."),
}


class DemandCollector:
    """A prometheus-client collector over the accounts of a worker, by pool: `registry.register(DemandCollector(lambda: accounts))`."""

    def __init__(self, accounts: Callable[[], Mapping[str, VerifierDemand | DrafterDemand]]) -> None:
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import Metric

        made: dict[str, Metric] = {}
        for pool, account in self._accounts().items():
            for counter, value in account.counters().items():
                name = next(family for family in _FAMILIES if counter.startswith(family))
                kind, meaning = _FAMILIES[name]
                family = made.setdefault(name, Metric(f"rootward_{name}", meaning, kind))
                rest = counter.removeprefix(name)
                if kind == "counter":  # by kind: wanted, ahead
                    family.add_sample(f"rootward_{name}_total", {"pool": pool, "kind": rest[1:]}, value)
                else:
                    family.add_sample(f"rootward_{name}{rest}", {"pool": pool}, value)
        yield from made.values()
