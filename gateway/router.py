"""Which verifier a request goes to: a plain function of what is known about them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

AFFINITY_SLACK = 0.25  # share of a verifier's sessions that a warm KV cache is worth


@dataclass(frozen=True, slots=True)
class VerifierView:
    """One verifier as this gateway sees it."""

    name: str
    ready: bool  # it answered lately, fits the model and is not draining
    num_running: int = 0  # of all gateways, as it last said
    num_waiting: int = 0
    max_sessions: int = 1
    num_in_flight: int = 0  # of this gateway, now

    @property
    def load(self) -> float:
        """Requests per session slot. What this gateway sent is newer than what the verifier last said."""
        return max(self.num_running + self.num_waiting, self.num_in_flight) / max(1, self.max_sessions)


class Outcome(str, Enum):
    """Why a verifier was chosen; a label of the metric `route_decisions_total`."""

    AFFINITY = "affinity"
    LEAST_LOAD = "least_load"
    FALLBACK = "fallback"  # one that was to be avoided, because there is no other


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    outcome: Outcome


def choose(
    views: Sequence[VerifierView], key: str, *, affinity: str = "", avoid: Collection[str] = frozenset()
) -> Choice | None:
    """A verifier for the request `key`, or None when none is ready.

    `affinity` names the verifier that holds the session's KV; it wins unless it is clearly busier than the least loaded
    one. Equally loaded verifiers share by a hash of `key`. Those in `avoid` failed this request already.
    """
    ready = [v for v in views if v.ready]
    wanted = [v for v in ready if v.name not in avoid]
    least = min(wanted or ready, key=lambda v: (v.load, _score(key, v.name)), default=None)
    if least is None:
        return None
    if not wanted:
        return Choice(least.name, Outcome.FALLBACK)
    if any(v.name == affinity and v.load <= least.load + AFFINITY_SLACK for v in wanted):
        return Choice(affinity, Outcome.AFFINITY)
    return Choice(least.name, Outcome.LEAST_LOAD)


def _score(key: str, name: str) -> bytes:
    """Rendezvous hashing: adding or removing a verifier moves only the keys that must move."""
    return hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
