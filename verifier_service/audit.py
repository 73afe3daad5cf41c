"""Which drafters may be verified by ratio tests: those of trusted pools that the audit has not caught (`rootward.core.audit`).

A drafter is named by its address, not by its process: with a Redis its record outlives both sides, and what several verifiers see adds up.

    rw:audit:{drafter}   hash   by verifier process: what it saw, as JSON (`cleared`, `draws`, `caught`: the strategy that raised the alarm,
                                `log_product`: logarithm of the wealth by strategy, `written_s`: seconds since 1970); `cleared`: an
                                operator counts it up to start afresh, what was seen before counts no more
                                (HINCRBY rw:audit:HOST:PORT cleared 1)

Each process writes its own field as a whole, so a write may be repeated, and a Redis that lost its data gets them back from those alive. A
field that its process has not written for `KEPT_S`, or that was written before the drafter was cleared, is removed by the next process that
reads it; what raised an alarm, only by one that has written the alarm into its own field.

Trees of a drafter that was caught, or of an untrusted pool, are verified by match, which is lossless for any tree: no request fails.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis, RedisCluster

from rootward.core.arrays import Floats
from rootward.core.audit import STRATEGIES, Draws, Record, joined
from rootward.errors import Unavailable
from rootward.metrics import Gauges, counter
from rootward.redis_client import KEY_PREFIX, answering

log = structlog.get_logger("verifier.audit")

BATCH_DRAWS = 256  # evaluated together: an operation on arrays costs the same for one draw and for many
SYNC_S = 2.0  # between two exchanges with Redis
TIMEOUT_S = 2.0
AT_ONCE = 64  # drafters whose records are exchanged together; each takes a connection
KEPT_S = 30 * 86400  # a field and the hash, after they were last written: processes and addresses of pods come and go
CLEARED = "cleared"
GAUGES = {
    "drafter_audit_log_wealth": "Logarithm of the evidence that a drafter draws from another distribution than it declares.",
    "drafter_audit_caught": "1 from the alarm of the audit until an operator clears the drafter.",
}


@dataclass
class Audited:
    """One drafter.

    record   what this process saw, and since the last exchange with Redis what others did
    own      logarithm of the wealth that this process saw, by strategy
    pending  draws not evaluated yet
    saved    draws of this process that Redis knows of; -1 before the first exchange
    asked    whether Redis was asked what others saw, with or without an answer
    used_s   when it was last up or asked for here, seconds since 1970
    """

    record: Record = field(default_factory=Record)
    own: Floats = field(default_factory=lambda: np.zeros(len(STRATEGIES)))
    pending: list[Draws] = field(default_factory=list)
    caught: str = ""
    cleared: int = 0
    saved: int = -1
    asked: bool = False
    used_s: float = 0.0

    def to_json(self, now_s: float) -> str:
        """now_s: seconds since 1970."""
        seen = {"written_s": now_s, "cleared": self.cleared, "draws": self.record.num_draws, "caught": self.caught}
        return json.dumps({**seen, "log_product": self.own.tolist()})


class DrafterAudit:
    """The audit of all drafters of a verifier. worker: name of its process; wall_s: seconds since 1970. Nothing here waits for Redis but
    `run`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        worker: str,
        *,
        untrusted_pools: Collection[str] = (),
        redis: Redis | RedisCluster | None = None,
        prefix: str = KEY_PREFIX,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._untrusted = frozenset(untrusted_pools)
        self._redis, self._prefix = redis, prefix
        self._worker, self._wall_s = worker, wall_s
        self._drafters: dict[str, Audited] = {}
        self._num_forgotten = 0
        self._new = asyncio.Event()
        meaning = "Drafters that were caught drawing from another distribution than they declare."
        self._alarms = counter(registry, "drafter_audit_alarms", meaning, "drafter")
        Gauges(registry, GAUGES, self._values)

    def trusts(self, drafter: str, pool: str) -> bool:
        """Whether trees of this drafter may be verified by ratio tests. Depends on past rounds alone. With a Redis a drafter is not trusted
        before Redis was asked: a verifier that has just started knows nothing of its record."""
        audited = self._known(drafter)
        return pool not in self._untrusted and not audited.caught and (self._redis is None or audited.asked)

    def _known(self, drafter: str) -> Audited:
        if drafter not in self._drafters:
            self._drafters[drafter] = Audited()
            self._new.set()
        audited = self._drafters[drafter]
        audited.used_s = self._wall_s()
        return audited

    def _forget(self) -> None:
        """Drop drafters that are long gone, as Redis does: pods come with new addresses for ever. One that was caught stays so."""
        oldest_s = self._wall_s() - KEPT_S
        gone = [name for name, one in self._drafters.items() if one.used_s < oldest_s and not one.caught]
        for name in gone:
            del self._drafters[name]
        self._num_forgotten += len(gone)

    def observe(self, drafter: str, draws: Draws) -> None:
        """A round verified these draws of the drafter."""
        audited = self._known(drafter)
        if len(draws):
            audited.pending.append(draws)
        if sum(map(len, audited.pending)) >= BATCH_DRAWS:
            self._evaluate(drafter, audited)

    def _values(self) -> dict[str, dict[str, float]]:
        known = sorted(self._drafters.items())
        return {
            "drafter_audit_log_wealth": {name: one.record.log_wealth for name, one in known},
            "drafter_audit_caught": {name: bool(one.caught) for name, one in known},
        }

    def gauges(self) -> dict[str, float]:
        """Of drafters that were caught, by address."""
        return {f"drafter_caught/{name}": 1.0 for name, audited in self._drafters.items() if audited.caught}

    async def run(self, drafters: Callable[[], Collection[str]] = tuple) -> None:
        """Evaluate what is left over, and exchange records with Redis, for ever. Ends by cancellation. drafters: names of those that are
        up, whose records are read before they are used."""
        while True:
            self._new.clear()
            up = frozenset(drafters())
            for name in up:
                self._known(name)
            self._forget()
            due = []
            for name, audited in self._drafters.items():
                if audited.pending:
                    self._evaluate(name, audited)
                # Also without draws of its own: another verifier may have caught the drafter, or an operator cleared it.
                is_new = audited.saved != audited.record.num_draws
                if self._redis is not None and (name in up or is_new or audited.caught):
                    due.append(name)
            # Together: a Redis that does not answer would take its time for each, and nobody trusts a drafter before it was asked.
            for begin in range(0, len(due), AT_ONCE):
                await asyncio.gather(*map(self._exchanged, due[begin : begin + AT_ONCE]))
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._new.wait()

    async def _exchanged(self, name: str) -> None:
        try:
            await self._exchange(name, self._drafters[name])
        except Exception:  # a bug leaves this drafter untrusted, not all of them
            log.exception("audit_failed", drafter=name)

    def _evaluate(self, name: str, audited: Audited) -> None:
        """Add the pending draws to the record of the drafter, and judge it."""
        audited.own += audited.record.observe(joined(audited.pending))
        audited.pending = []
        self._judge(name, audited)

    def _judge(self, name: str, audited: Audited, caught_elsewhere: str = "") -> None:
        """Raise the alarm once, if the record or another process gives reason. caught_elsewhere: the strategy that raised it there."""
        if audited.caught:
            return
        # A false alarm is as unlikely whatever the number of drafters that were ever judged.
        num_judged = len(self._drafters) + self._num_forgotten
        audited.caught = caught_elsewhere or audited.record.caught(max(1, num_judged))
        if not audited.caught:
            return
        self._alarms.labels(name).inc()
        log.error(
            "drafter_caught",
            drafter=name,
            strategy=audited.caught,
            log_wealth=round(audited.record.log_wealth, 1),
            draws=audited.record.num_draws,
            response="its trees are verified by match until an operator clears it",
        )

    async def _exchange(self, name: str, audited: Audited) -> None:
        """Tell what was seen here, take over what other processes saw."""
        assert self._redis is not None
        key, draws, now_s = f"{self._prefix}:audit:{name}", audited.record.num_draws, self._wall_s()
        try:
            async with answering("Redis", TIMEOUT_S, Unavailable):
                cleared = _number(await self._redis.hget(key, CLEARED))
                if audited.saved < 0:
                    audited.cleared = cleared
                elif cleared > audited.cleared:
                    self._drafters[name] = audited = Audited(cleared=cleared, used_s=audited.used_s)
                    draws = 0
                    log.warning("drafter_cleared", drafter=name)
                if draws or audited.caught:
                    await self._redis.hset(key, self._worker, audited.to_json(now_s))
                    await self._redis.expire(key, KEPT_S)
                known: Any = await self._redis.hgetall(key)
                fields = {w: _seen(value) for w, value in known.items() if w not in (CLEARED, self._worker)}
                others = {w: seen for w, seen in fields.items() if seen is not None}
                if gone := [w for w, seen in others.items() if self._is_gone(seen, cleared, told=audited.caught)]:
                    await self._redis.hdel(key, *gone)
        except Unavailable as error:
            audited.asked = True
            log.debug("audit_not_saved", drafter=name, error=str(error))
            return
        audited.saved = draws
        counted = [seen for w, seen in others.items() if w not in gone and seen["cleared"] == audited.cleared]
        audited.record.log_product = audited.own + sum((seen["log_product"] for seen in counted), np.zeros(1))
        audited.asked = True
        self._judge(name, audited, next((seen["caught"] for seen in counted if seen["caught"]), ""))

    def _is_gone(self, seen: Mapping[str, Any], cleared: int, *, told: str) -> bool:
        """Whether a field counts no more. told: the alarm that the field of this process tells."""
        if seen["cleared"] < cleared:
            return True
        # Fields of older releases have no time; they go with the hash.
        return seen.get("written_s", math.inf) < self._wall_s() - KEPT_S and (bool(told) or not seen["caught"])


def _number(found: object) -> int:
    """What an operator has counted up; 0 for nothing, and for what is no number."""
    return int(text) if (text := str(found)).isdecimal() and len(text) < 16 else 0


def _seen(value: str) -> dict[str, Any] | None:
    """The field of another process. None: it cannot be read; it counts for nothing, and must not end the audit of all drafters.

    The alarm of a release with other strategies counts, its wealth cannot be added to ours."""
    try:
        seen = json.loads(value)
        product = np.array(seen["log_product"], dtype=np.float64)
        fits = product.shape == (len(STRATEGIES),) and bool(np.isfinite(product).all())
        own = product if fits else np.zeros(len(STRATEGIES))
        times = {"written_s": float(seen["written_s"])} if "written_s" in seen else {}
        return {"cleared": int(seen["cleared"]), "caught": str(seen["caught"]), "log_product": own, **times}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        log.warning("audit_unreadable", error=repr(error))
        return None
