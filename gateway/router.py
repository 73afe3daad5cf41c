"""Which verifier a request goes to: a plain function of what is known about them.

    cost of a verifier = load  −  what the part of the prompt whose KV it holds is worth

Load is requests per session slot. KV already computed saves prefill, and by how much grows with its length, but it is never worth more than
`KV_WORTH` of a verifier's slots: however warm a cache, it does not draw everybody to one place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

KV_WORTH = 0.25  # share of a verifier's slots that a long prefix is worth
HALF_WORTH_TOKENS = 128  # so many tokens are worth half of it
SHAKY_COST = 0.5  # of a verifier that was lost a moment ago


@dataclass(frozen=True, slots=True)
class VerifierView:
    """One verifier as this gateway sees it."""

    name: str
    ready: bool  # it answered lately, fits the model and is not draining
    num_running: int = 0  # of all gateways, as it last said
    num_waiting: int = 0
    max_sessions: int = 1
    num_in_flight: int = 0  # of this gateway, now
    shaky: bool = False  # it was lost a moment ago, and may be again

    @property
    def load(self) -> float:
        """Requests per session slot. What this gateway sent is newer than what the verifier last said."""
        return max(self.num_running + self.num_waiting, self.num_in_flight) / max(1, self.max_sessions)


class Outcome(str, Enum):
    """Why a verifier was chosen; a label of the metric `route_decisions_total`."""

    AFFINITY = "affinity"  # it holds some of the prompt
    LEAST_LOAD = "least_load"
    FALLBACK = "fallback"  # one that was to be avoided, because there is no other


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    outcome: Outcome


def choose(
    views: Sequence[VerifierView],
    key: str,
    *,
    held: Mapping[str, int] | None = None,
    avoid: Collection[str] = frozenset(),
) -> Choice | None:
    """A verifier for the request `key`, or None when none is ready.

    `held`: tokens of the prompt whose KV a verifier is thought to hold, by name. Those in `avoid` failed this request already. Equal costs
    are told apart by a hash of `key`, so that turns of a session go the same way.
    """
    held = held or {}
    ready = [v for v in views if v.ready]
    wanted = [v for v in ready if v.name not in avoid]
    best = min(wanted or ready, key=lambda v: (cost(v, held.get(v.name, 0)), _score(key, v.name)), default=None)
    if best is None:
        return None
    if not wanted:
        return Choice(best.name, Outcome.FALLBACK)
    return Choice(best.name, Outcome.AFFINITY if held.get(best.name) else Outcome.LEAST_LOAD)


def cost(view: VerifierView, num_held: int) -> float:
    return view.load - KV_WORTH * num_held / (num_held + HALF_WORTH_TOKENS) + SHAKY_COST * view.shaky


def _score(key: str, name: str) -> bytes:
    """Rendezvous hashing: adding or removing a verifier moves only the keys that must move."""
    return hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
