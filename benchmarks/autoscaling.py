"""Autoscaling signals for drafters compared by discrete-event simulation: sessions, pods, queues, scrapes, syncs.

    python -m benchmarks.autoscaling --out FOLDER

Load: 12 sessions, 96 from 300 s, 12 again from 1 200 s. Every signal drives the same model of the HPA (`hpa.py`) with the chart's rules.

A session repeats rounds: its drafter grows a tree (S seconds, one row of a pod), the verifier checks it (Z). In lock-step one follows the
other; where drafting overlaps verification a round takes the longer of both. Stall is the time that queueing at the drafter adds to a
round. Sessions are placed on the pod with the fewest, and move when theirs is full and another has room (`Plan.rebalance`).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.hpa import DEFAULT_UP, Autoscaler, Policy, Rules, Spec, Target
from benchmarks.results import described

SCRAPE_S = 15.0
WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """Times of a round in seconds; the fixed share of each is constant, the rest exponential. rows: sessions that a pod drafts for at
    the same time; width: rows that a session fills while it drafts."""

    draft_s: float = 0.2
    draft_fixed: float = 0.5
    verify_s: float = 0.6
    verify_fixed: float = 0.7
    rows: int = 4
    overlap: bool = False
    width: float = 1.0

    def draw(self, mean: float, fixed: float, rng: random.Random) -> float:
        return mean * (fixed + (1 - fixed) * rng.expovariate(1.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens: sessions wanted by time, pods at the start, how long a pod takes to start, whether sessions may move, whether the pod
    with the fewest goes first (else the youngest, as a ReplicaSet does by itself)."""

    sessions: Callable[[float], int]
    end_s: float = 2400.0
    pods: int = 2
    start_s: tuple[float, float] = (45.0, 55.0)
    rebalance: bool = True
    emptiest_goes: bool = False
    scrape_s: float = SCRAPE_S


@dataclass(slots=True)
class Counters:
    """Cumulative, as the services export them."""

    rounds: int = 0
    round_s: float = 0.0
    stall_s: float = 0.0
    row_s: float = 0.0  # wanted growth
    growths: int = 0
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one look shows: counters, and how things are now."""

    at_s: float
    counters: Counters
    sessions: int
    ready: int
    queued: int
    busy: int


Signal = Callable[["Seen"], list[float | None]]


@dataclass(frozen=True, slots=True)
class Seen:
    """Two scrapes a window apart: what a recording rule computes from."""

    old: Scrape
    new: Scrape
    work: Work

    def increase(self, name: str) -> float:
        return float(getattr(self.new.counters, name) - getattr(self.old.counters, name))

    @property
    def rounds(self) -> float:
        return self.increase("rounds")

    @property
    def demand(self) -> float | None:
        """D = N·A/R0."""
        if not self.new.sessions:
            return 0.0
        growths, base_s = self.increase("growths"), self.increase("round_s") - self.increase("stall_s")
        if not growths or base_s <= 0:
            return None
        return self.new.sessions * (self.increase("row_s") / growths) / (base_s / self.rounds)

    @property
    def busy(self) -> float:
        """Share of rows busy with wanted growth."""
        seconds = self.new.at_s - self.old.at_s
        return (
            self.increase("row_s") / seconds / (self.new.ready * self.work.rows) if self.new.ready and seconds else 0.0
        )

    @property
    def stall(self) -> float:
        """Share of the rounds' time spent queueing, limited."""
        return min(self.increase("stall_s") / self.increase("round_s"), 0.15) if self.increase("round_s") else 0.0

    @property
    def queue_s(self) -> float:
        """Mean time in a drafter's queue."""
        return self.increase("queue_s") / self.increase("growths") if self.increase("growths") else 0.0


@dataclass(slots=True, eq=False)
class Pod:
    ready_s: float
    sessions: int = 0
    busy: int = 0
    queue: deque[tuple[Session, float]] = field(default_factory=deque)  # (who, since when)
    leaving: bool = False


@dataclass(slots=True, eq=False)
class Session:
    pod: Pod | None = None
    began_s: float = 0.0
    extra_s: float = 0.0  # a draft prefill after a move
    verified_s: float = 0.0  # overlap: when verifying would end
    grown_s: float = 0.0  # when growth would have ended without a queue


@dataclass(frozen=True, slots=True)
class Outcome:
    """times, wanted, ready: one entry per scrape."""

    times: tuple[float, ...]
    sessions: tuple[int, ...]
    wanted: tuple[int, ...]
    ready: tuple[int, ...]
    rounds: int
    stall_ms: float
    pod_s: float
    moves: int

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in pairwise(self.wanted))

    @property
    def swings(self) -> int:
        """Changes of direction: 1 is up and down again."""
        steps = [b - a for a, b in pairwise(self.wanted) if a != b]
        return sum(a * b < 0 for a, b in pairwise(steps))

    def short_s(self, optimum: int, least_sessions: int) -> float:
        """Seconds under load with ready pods more than one below the optimum."""
        low = [r < optimum - 1 for r, n in zip(self.ready, self.sessions, strict=True) if n >= least_sessions]
        return SCRAPE_S * sum(low)


class Pool:
    """One run. `signal` None: the pool stays as it is."""

    def __init__(self, work: Work, plan: Plan, autoscaler: Autoscaler | None, signal: Signal | None, seed: int) -> None:
        self.work, self.plan, self.autoscaler, self.signal = work, plan, autoscaler, signal
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.counters = Counters()
        self.pods = [Pod(0.0) for _ in range(plan.pods)]
        self.num_sessions = self.moves = 0
        self.pod_s = 0.0
        self.scrapes: deque[Scrape] = deque(maxlen=int(WINDOW_S / SCRAPE_S) + 1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._trace: list[tuple[float, int, int, int]] = []

    def run(self) -> Outcome:
        self.at(0.0, self.scrape)
        while self._events and self._events[0][0] <= self.plan.end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        c = self.counters
        times, sessions, wanted, ready = zip(*self._trace, strict=True)
        stall_ms = 1e3 * c.stall_s / max(1, c.rounds)
        return Outcome(times, sessions, wanted, ready, c.rounds, stall_ms, self.pod_s, self.moves)

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, event))

    @property
    def ready(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.ready_s <= self.now_s]

    # -- every 15 s ---------------------------------------------------------------------------------------------------

    def scrape(self) -> None:
        self._populate()
        ready = self.ready
        queued, busy = sum(len(pod.queue) for pod in ready), sum(pod.busy for pod in ready)
        counters = Counters(*(getattr(self.counters, name) for name in Counters.__slots__))
        self.scrapes.append(Scrape(self.now_s, counters, self.num_sessions, len(ready), queued, busy))
        if self.autoscaler is not None and self.signal is not None:
            seen = Seen(self.scrapes[0], self.scrapes[-1], self.work)
            self._resize(self.autoscaler.sync(self.now_s, len(self.pods), len(ready), self.signal(seen)))
        self._trace.append((self.now_s, self.num_sessions, len(self.pods), len(ready)))
        self.pod_s += self.plan.scrape_s * len(self.pods)
        self.at(self.now_s + self.plan.scrape_s, self.scrape)

    def _populate(self) -> None:
        for _ in range(self.plan.sessions(self.now_s) - self.num_sessions):
            self.num_sessions += 1
            self.begin(Session())

    def _resize(self, wanted: int) -> None:
        while len(self.pods) < wanted:
            self.pods.append(Pod(self.now_s + self.rng.uniform(*self.plan.start_s)))
        for pod in sorted(self.pods, key=self._stays)[: len(self.pods) - wanted]:
            self.pods.remove(pod)
            pod.leaving = True
            while pod.queue:  # it drains: what waits here waits elsewhere
                session, since_s = pod.queue.popleft()
                self._leave(session)
                self._request(session, since_s)

    def _stays(self, pod: Pod) -> tuple[bool, float]:
        """The smaller goes first: those that are not ready yet, then as the plan says."""
        return pod.ready_s <= self.now_s, pod.sessions if self.plan.emptiest_goes else -pod.ready_s

    # -- one session --------------------------------------------------------------------------------------------------

    def begin(self, session: Session) -> None:
        """A round."""
        if self.num_sessions > self.plan.sessions(self.now_s):
            self.num_sessions -= 1
            self._leave(session)
            return
        session.began_s = self.now_s
        verify_s = self.work.draw(self.work.verify_s, self.work.verify_fixed, self.rng)
        session.verified_s = verify_s
        self._place(session)
        if session.pod is None:  # nobody drafts: plain decoding
            session.grown_s = self.now_s
            self.at(self.now_s + verify_s, lambda: self._committed(session))
        else:
            self._request(session, self.now_s)

    def _place(self, session: Session) -> None:
        ready = self.ready
        if session.pod is not None and session.pod.leaving:
            self._leave(session)
        if not ready:
            return
        least = min(ready, key=lambda pod: pod.sessions)
        mine = session.pod
        if mine is None:
            session.pod = least
            least.sessions += 1
        elif self.plan.rebalance and self._better(mine, least):
            self._leave(session)
            session.pod = least
            least.sessions += 1
            session.extra_s = self.work.draft_s
            self.moves += 1

    def _better(self, mine: Pod, least: Pod) -> bool:
        """Mine is full or queues, holds clearly more, and the other has room."""
        full = bool(mine.queue) or mine.busy >= self.work.rows
        return full and mine.sessions > 1.25 * least.sessions + 1 and least.busy < self.work.rows

    def _leave(self, session: Session) -> None:
        if session.pod is not None:
            session.pod.sessions -= 1
            session.pod = None

    def _request(self, session: Session, since_s: float) -> None:
        if session.pod is None:
            self._place(session)
        if session.pod is None:
            session.grown_s = self.now_s
            self.at(self.now_s + session.verified_s, lambda: self._committed(session))
        elif session.pod.busy < self.work.rows:
            self._grow(session, session.pod, since_s)
        else:
            session.pod.queue.append((session, since_s))

    def _grow(self, session: Session, pod: Pod, since_s: float) -> None:
        pod.busy += 1
        seconds = self.work.draw(self.work.draft_s, self.work.draft_fixed, self.rng) + session.extra_s
        session.extra_s = 0.0
        self.counters.queue_s += self.now_s - since_s
        session.grown_s = since_s + seconds
        self.at(self.now_s + seconds, lambda: self._grown(session, pod, seconds))

    def _grown(self, session: Session, pod: Pod, seconds: float) -> None:
        pod.busy -= 1
        self.counters.row_s += self.work.width * seconds
        self.counters.growths += 1
        if pod.queue:
            waiting, since_s = pod.queue.popleft()
            self._grow(waiting, pod, since_s)
        if self.work.overlap:
            self.at(max(self.now_s, session.began_s + session.verified_s), lambda: self._committed(session))
        else:
            self.at(self.now_s + session.verified_s, lambda: self._committed(session))

    def _committed(self, session: Session) -> None:
        c, took_s = self.counters, self.now_s - session.began_s
        alone_s = session.grown_s - session.began_s
        base_s = max(alone_s, session.verified_s) if self.work.overlap else alone_s + session.verified_s
        c.rounds += 1
        c.round_s += took_s
        c.stall_s += max(0.0, took_s - base_s)
        self.begin(session)


DOWN = Rules(180, (Policy("Pods", 2, 60), Policy("Percent", 20, 60)), "Min")
PEAK, REST = 96, 12
UTILISATION = 0.7
MOST = 40


def step(now_s: float) -> int:
    return PEAK if 300 <= now_s < 1200 else REST


def ramp(now_s: float) -> int:
    """Ten minutes up, ten down."""
    return round(REST + (PEAK - REST) * max(0.0, min(1.0, (now_s - 300) / 600, (2100 - now_s) / 600)))


def wave(now_s: float) -> int:
    """A period of ten minutes."""
    return round((PEAK + REST) / 2 - (PEAK - REST) / 2 * math.cos(2 * math.pi * now_s / 600))


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to scale: what is measured, against which targets."""

    name: str
    signal: Signal | None
    targets: tuple[Target, ...] = ()
    rebalance: bool = True
    pods: int = 2
    emptiest_goes: bool = False


def schemes(work: Work) -> list[Scheme]:
    demand, busy, stall = Target("AverageValue", work.rows * UTILISATION), Target("Value", 0.85), Target("Value", 0.10)

    def drafting(seen: Seen) -> float:
        """Rows in flight; growth ahead of the verdict fills them where drafting overlaps verifying."""
        return seen.new.sessions if work.overlap else seen.new.busy

    return [
        Scheme("D = N·A/R0", lambda s: [s.demand], (demand,)),
        Scheme("D + both guards (default)", lambda s: [s.demand, s.busy, s.stall], (demand, busy, stall)),
        Scheme("rows busy alone", lambda s: [s.busy], (Target("Value", UTILISATION),)),
        Scheme("in flight + queued", lambda s: [drafting(s) + s.new.queued], (demand,)),
        Scheme("queue depth ÷ 5", lambda s: [float(s.new.queued)], (Target("AverageValue", 5.0),)),
        Scheme("mean queue time, S/10", lambda s: [s.queue_s], (Target("Value", work.draft_s / 10),)),
        Scheme("mean queue time, S/2", lambda s: [s.queue_s], (Target("Value", work.draft_s / 2),)),
        Scheme("stall ratio alone", lambda s: [s.stall], (stall,)),
        Scheme("D, sessions pinned", lambda s: [s.demand], (demand,), rebalance=False),
        Scheme("D, the emptiest goes first", lambda s: [s.demand], (demand,), emptiest_goes=True),
    ]


def fixed(pods: int) -> Scheme:
    return Scheme(f"{pods} fixed", None, pods=pods)


def run(scheme: Scheme, work: Work, seed: int, load: Callable[[float], int] = step, end_s: float = 2400.0) -> Outcome:
    autoscaler = Autoscaler(Spec(scheme.targets, 1, MOST, DEFAULT_UP, DOWN)) if scheme.signal else None
    plan = Plan(load, end_s, pods=scheme.pods, rebalance=scheme.rebalance, emptiest_goes=scheme.emptiest_goes)
    return Pool(work, plan, autoscaler, scheme.signal, seed).run()


def optimum(work: Work) -> int:
    """The fewest pods at the peak with which demand fills no more than u of their rows."""
    for pods in range(1, MOST):
        pool = Pool(work, Plan(lambda now_s: PEAK, 300.0, pods=pods), None, None, 0)
        pool.run()
        demand = Seen(pool.scrapes[0], pool.scrapes[-1], work).demand
        if demand is not None and demand <= pods * work.rows * UTILISATION:
            return pods
    return MOST


def row(scheme: Scheme, work: Work, seeds: range, best: int, load: Callable[[float], int] = step) -> dict[str, float]:
    """Means over seeds."""
    outcomes = [run(scheme, work, seed, load) for seed in seeds]
    return {
        "peak": mean(max(o.wanted) for o in outcomes),
        "short_s": mean(o.short_s(best, PEAK) for o in outcomes),
        "changes": mean(o.changes for o in outcomes),
        "swings": mean(o.swings for o in outcomes),
        "pod_s": mean(o.pod_s for o in outcomes),
        "stall_ms": mean(o.stall_ms for o in outcomes),
        "rounds": mean(o.rounds for o in outcomes),
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| signal | peak | short s | changes | swings | pod-s | stall ms | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        cells = [f"{r['peak']:.3g}", f"{r['short_s']:.0f}", f"{r['changes']:.1f}", f"{r['swings']:.1f}"]
        cells += [f"{r['pod_s'] / 1e3:.1f} k", f"{r['stall_ms']:.0f}", f"{r['rounds'] / 1e3:.1f} k"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(work: Work, seeds: range, title: str) -> tuple[str, dict[str, object]]:
    """(tables, their values) of one way to draft."""
    best = optimum(work)
    every = (*schemes(work), *(fixed(n) for n in (2, 4, 6, 9, 12, 16, 24)))
    rows = {s.name: row(s, work, seeds, best) for s in every}
    for load in (ramp, wave):
        rows |= {f"{s.name}, {load.__name__}": row(s, work, seeds, best, load) for s in schemes(work)[:2]}
    text = f"## {title}: optimum at the peak {best} pods\n\n{table(rows)}\n"
    return text, {"work": repr(work), "optimum": best, "rows": rows}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.autoscaling", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of tables.md and autoscaling.json")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each signal (default 2)")
    return parser


def main() -> None:
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text, data = [], {}
    for title, overlap in (("lock-step", False), ("overlap", True)):
        tables, data[title] = report(Work(overlap=overlap), range(options.seeds), title)
        text.append(tables)
    (options.out / "tables.md").write_text("\n".join(text), encoding="utf-8")
    values = json.dumps({"environment": described(), **data}, indent=1)
    (options.out / "autoscaling.json").write_text(values + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
