"""What a tenant may use: a bucket of tokens that fills at a steady rate, shared by all gateways through the session store.

A request takes prompt + max_tokens before it runs and gets back what it did not use. While the store does not answer each gateway counts by
itself, with the whole rate: an outage must not refuse anybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rootward.errors import RateLimited

LONGEST_RETRY_AFTER_S = 60.0
FORGET_AT = 4096  # tenants


@dataclass(frozen=True, slots=True)
class Rate:
    """`tokens_per_s` into a bucket of `size` tokens."""

    tokens_per_s: float
    size: float


class Buckets:
    """Buckets of one process; the rule is that of `redis_schema.TAKE_TOKENS`. `now` is in seconds."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._levels: dict[str, tuple[float, float]] = {}  # tenant → (level, when)

    def take(self, tenant: str, cost: int, rate: Rate) -> float:
        """0 if taken; else seconds until it could be. A full bucket may be overdrawn by one request. Negative costs are given back."""
        now = self._now()
        level, at = self._levels.get(tenant, (rate.size, now))
        level = min(rate.size, level + (now - at) * rate.tokens_per_s)
        needed = min(cost, rate.size)
        if cost > 0 and level < needed:
            return (needed - level) / rate.tokens_per_s
        self._levels[tenant] = min(rate.size, level - cost), now
        if len(self._levels) > FORGET_AT:
            self._levels = {name: known for name, known in self._levels.items() if not self._full(known, rate)}
        return 0.0

    def _full(self, known: tuple[float, float], rate: Rate) -> bool:
        return known[0] + (self._now() - known[1]) * rate.tokens_per_s >= rate.size


def refusal(tenant: str, cost: int, wait_s: float) -> RateLimited:
    """What a tenant is told whose bucket is empty."""
    retry_after_s = float(math.ceil(min(wait_s, LONGEST_RETRY_AFTER_S)))
    return RateLimited(f"tenant: {tenant!r} has used up its tokens; {cost} are asked for", retry_after_s=retry_after_s)
