"""Which drafter a session goes to, and when it moves to another: plain functions of what is known about the drafters.

Looks at load, clocks and what past rounds gave, never at a tree: which drafter draws next is free to follow the past (L1 of
algorithms.md 6), and a move keeps or drops whole trees between rounds (L5).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

CROWDED = 0.5  # share of its capacity from which a drafter is worth leaving for balance
QUEUEING_S = 0.02  # or how long a commit waits there for its turn
FAR = 2.0  # how many times slower a drafter of another zone is taken to be
MORE, AND = 1.25, 1  # hysteresis: it must hold MORE times what the other holds AND one


@dataclass(frozen=True, slots=True)
class DrafterView:
    """One drafter as this verifier sees it.

    room      sessions it would take now;  capacity, used  of all verifiers, as it last said;  own  of this verifier
    latency_s commit to first growth, lately (0: unknown);  gain  tokens per round with its trees (0: unknown)
    leaving   drains, or was not found any more;  fresh  what it said of its load is news
    near      in the same zone, or who knows: counts until its latency is known
    """

    name: str
    room: int = 0
    capacity: int = 1
    used: int = 0
    own: int = 0
    latency_s: float = 0.0
    queue_s: float = 0.0
    gain: float = 0.0
    leaving: bool = False
    fresh: bool = True
    near: bool = True

    @property
    def share(self) -> float:
        """Of its capacity in use."""
        return self.used / max(1, self.capacity)


@dataclass(frozen=True, slots=True)
class Move:
    """One session of this verifier, from a drafter to another."""

    source: str
    target: str
    urgent: bool = False  # the source leaves


def place(views: Sequence[DrafterView], *, unfit: Collection[str] = ()) -> str | None:
    """The best drafter with room for one more session; None if there is none. unfit: those that can never take it.

    The best by free share × tokens per round ÷ latency. What is not known of a drafter is as good as the best known: so it is tried.
    """
    candidates = [v for v in views if v.room > 0 and v.name not in unfit]
    gain = max((v.gain for v in candidates), default=0.0) or 1.0
    quickest_s = min((v.latency_s for v in candidates if v.latency_s > 0), default=1.0)

    def score(view: DrafterView) -> float:
        guess = 1.0 if view.near else FAR
        slower = max(1.0, view.latency_s / quickest_s) if view.latency_s > 0 else guess
        free = max(view.room, view.capacity - view.used) / max(1, view.capacity)
        return free * (view.gain or gain) / slower

    best = max(candidates, key=lambda v: (score(v), v.room), default=None)
    return None if best is None else best.name


def moves(views: Sequence[DrafterView], *, most: int, most_urgent: int) -> list[Move]:
    """Sessions to be moved now: off drafters that leave first, then from crowded ones to emptier ones."""
    found: list[Move] = []
    state = {v.name: v for v in views}
    for name in [v.name for v in views if v.leaving]:
        while len(found) < most_urgent and state[name].own > 0:
            target = place([v for v in state.values() if not v.leaving])
            if target is None:
                break
            found.append(_moved(state, name, target, urgent=True))
    for _ in range(most):
        pair = _worst_pair(list(state.values()))
        if pair is None:
            break
        found.append(_moved(state, *pair))
    return found


def _worst_pair(views: Sequence[DrafterView]) -> tuple[str, str] | None:
    """The fullest drafter that is crowded, and the emptiest one, if they differ by enough."""
    sources = [v for v in views if v.own > 0 and v.fresh and not v.leaving and _crowded(v)]
    targets = [v for v in views if v.room > 0 and v.fresh and not v.leaving]
    if not sources or not targets:
        return None
    source, target = max(sources, key=lambda v: v.share), min(targets, key=lambda v: v.share)
    there = target.share * source.capacity  # what the target holds, were it as large as the source
    return (source.name, target.name) if source.used > MORE * there + AND else None


def _crowded(view: DrafterView) -> bool:
    return view.share >= CROWDED or view.queue_s > QUEUEING_S


def _moved(state: dict[str, DrafterView], source: str, target: str, *, urgent: bool = False) -> Move:
    a, b = state[source], state[target]
    state[source] = replace(a, used=a.used - 1, own=a.own - 1)
    state[target] = replace(b, used=b.used + 1, own=b.own + 1, room=b.room - 1)
    return Move(source, target, urgent)
