"""Placement of sessions on drafters: which drafter a session is given, and which sessions move. Functions of `DrafterView` alone,
except that `moves` is told which pairs of drafters no session fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

CROWDED_SHARE = 0.5  # sessions leave a drafter from this share of its capacity on,
CROWDED_QUEUE_S = 0.02  # or if a commit is queued there for longer
OTHER_ZONE_SLOWDOWN = 2.0  # assumed until the latency is measured
IMBALANCE_FACTOR = 1.25  # hysteresis: a move needs IMBALANCE_FACTOR times the sessions of the target
IMBALANCE_MARGIN = 1  # plus IMBALANCE_MARGIN


@dataclass(frozen=True, slots=True)
class DrafterView:
    """One drafter as this verifier sees it.

    room            sessions that it would take now
    capacity, used  sessions of all verifiers, by its last report
    own             sessions of this verifier
    latency_s       recent time from a commit to the first growth; 0: unknown
    queue_s         part of it in the drafter's queue, by its last report
    gain            tokens per round with its trees; 0: unknown
    leaving         it drains, or discovery does not find it any more
    fresh           its report of load is recent
    near            in the same zone, or in an unknown one; read until the latency is known
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
        """Share of its capacity in use."""
        return self.used / max(1, self.capacity)


@dataclass(frozen=True, slots=True)
class Move:
    """Move of one session of this verifier between drafters."""

    source: str
    target: str
    urgent: bool = False  # the source drafter leaves


def best_drafter(views: Sequence[DrafterView]) -> str | None:
    """The drafter with the largest free share × tokens per round ÷ latency; None if none has room.

    Unknown values are assumed to equal the best known ones, so that new drafters are tried.
    """
    candidates = [v for v in views if v.room > 0]
    gain = max((v.gain for v in candidates), default=0.0) or 1.0
    quickest_s = min((v.latency_s for v in candidates if v.latency_s > 0), default=1.0)

    def score(view: DrafterView) -> float:
        assumed = 1.0 if view.near else OTHER_ZONE_SLOWDOWN
        slower = max(1.0, view.latency_s / quickest_s) if view.latency_s > 0 else assumed
        free = max(view.room, view.capacity - view.used) / max(1, view.capacity)
        return free * (view.gain or gain) / slower

    best = max(candidates, key=lambda v: (score(v), v.room), default=None)
    return None if best is None else best.name


def moves(
    views: Sequence[DrafterView], *, most: int, most_urgent: int, start: Callable[[Move], bool] = lambda move: True
) -> list[Move]:
    """The moves started: first away from drafters that leave (most_urgent), then from crowded to emptier drafters (most).

    start: starts a move, or returns False because no session of the source may use the target; then the next best pair is tried.
    """
    found: list[Move] = []
    state = {v.name: v for v in views}
    for name in [v.name for v in views if v.leaving]:
        targets = [v.name for v in views if not v.leaving]
        while len(found) < most_urgent and state[name].own > 0:
            target = best_drafter([state[other] for other in targets])
            if target is None:
                break
            move = Move(name, target, urgent=True)
            if start(move):
                found.append(_moved(state, move))
            else:
                targets.remove(target)
    for _ in range(most):
        balancing = next((move for move in _balancing(state.values()) if start(move)), None)
        if balancing is None:
            break
        found.append(_moved(state, balancing))
    return found


def _balancing(views: Iterable[DrafterView]) -> Iterator[Move]:
    """Moves from crowded drafters, the fullest first, to others, the emptiest first, whose loads differ by more than the hysteresis."""
    remaining = [v for v in views if v.fresh and not v.leaving]
    sources = sorted((v for v in remaining if v.own > 0 and _crowded(v)), key=lambda v: v.share, reverse=True)
    targets = sorted((v for v in remaining if v.room > 0), key=lambda v: v.share)
    for source in sources:
        for target in targets:
            scaled = target.share * source.capacity  # sessions of the target, scaled to the capacity of the source
            if source.used <= IMBALANCE_FACTOR * scaled + IMBALANCE_MARGIN:
                break  # the other targets are fuller
            yield Move(source.name, target.name)


def _crowded(view: DrafterView) -> bool:
    return view.share >= CROWDED_SHARE or view.queue_s > CROWDED_QUEUE_S


def _moved(state: dict[str, DrafterView], move: Move) -> Move:
    """A move, applied to `state`."""
    a, b = state[move.source], state[move.target]
    state[a.name] = replace(a, used=a.used - 1, own=a.own - 1)
    state[b.name] = replace(b, used=b.used + 1, own=b.own + 1, room=b.room - 1)
    return move
