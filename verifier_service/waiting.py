"""Who gets the next place: the line in front of the engine.

Better priority first (lower runs earlier). Within a priority whoever was running before (preempted) comes first, then tenants in turn by
the work they have asked for: one with a single request does not wait behind another's thousand. Within a tenant first come, first served.
The clocks are those of "Start-time Fair Queueing: A Scheduling Algorithm for Integrated Services Packet Switching Networks" (Goyal, Vin
and Cheng, SIGCOMM 1996): a tenant that was away starts at the present, it has saved up nothing; when nobody waits nothing is owed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar


class Applicant(Protocol):
    """number: order of arrival. work: tokens it may cost. done: it has left."""

    number: int
    done: bool

    @property
    def priority(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def work(self) -> int: ...


A = TypeVar("A", bound=Applicant)

FEW_CLOCKS = 64


class Tenants(Generic[A]):
    """Those of one priority. `_clock`: work asked for by each tenant that waits or was served since somebody waits, on one scale."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[A]] = {}
        self._clock: dict[str, float] = {}
        self._now = 0.0
        self._most_clocks = FEW_CLOCKS  # from so many on those that say nothing are looked for

    def __iter__(self) -> Iterator[A]:
        for line in self._lines.values():
            yield from line

    def push(self, one: A) -> None:
        if one.tenant not in self._lines:
            self._lines[one.tenant] = deque()
            self._clock[one.tenant] = max(self._now, self._clock.get(one.tenant, 0.0))
        self._lines[one.tenant].append(one)

    def discard(self, one: A) -> None:
        """It waits no longer, wherever it stands."""
        line = self._lines.get(one.tenant)
        if line is not None and one in line:
            line.remove(one)
            if not line:
                del self._lines[one.tenant]

    def head(self) -> A | None:
        """The next one; those that are done are forgotten."""
        for tenant, line in list(self._lines.items()):
            while line and line[0].done:
                line.popleft()
            if not line:
                del self._lines[tenant]
        lines = self._lines
        best = min(lines, key=lambda tenant: (self._clock[tenant], lines[tenant][0].number), default=None)
        return None if best is None else lines[best][0]

    def pop(self) -> A:
        one = self.head()
        assert one is not None
        line = self._lines[one.tenant]
        line.popleft()
        self._now = self._clock[one.tenant]
        self._clock[one.tenant] += one.work
        if not line:
            del self._lines[one.tenant]
        if len(self._clock) >= self._most_clocks:
            self._forget()
        return one

    def _forget(self) -> None:
        """A tenant that does not wait and is not ahead would start at the present anyway."""
        self._clock = {name: at for name, at in self._clock.items() if name in self._lines or at > self._now}
        self._most_clocks = max(FEW_CLOCKS, 2 * len(self._clock))


class WaitingLine(Generic[A]):
    """`head` is the next one, `pop` takes it. Whoever is `done` is passed over and not counted."""

    def __init__(self) -> None:
        self._back: list[A] = []  # preempted ones
        self._fresh: dict[int, Tenants[A]] = {}  # by priority

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[A]:
        yield from (one for one in chain(self._back, *self._fresh.values()) if not one.done)

    @property
    def num_fresh(self) -> int:
        """Those that have never had a place."""
        return sum(1 for tenants in self._fresh.values() for one in tenants if not one.done)

    def push(self, one: A) -> None:
        """Behind those of its tenant."""
        self._fresh.setdefault(one.priority, Tenants()).push(one)

    def push_front(self, one: A) -> None:
        """It has been running: before all fresh ones of its priority; its tenant has paid already."""
        self._back.append(one)

    def discard(self, one: A) -> None:
        """It has ended. Without this whoever is cancelled behind a head that waits long would be held as long."""
        if one in self._back:
            self._back.remove(one)
        elif (tenants := self._fresh.get(one.priority)) is not None:
            tenants.discard(one)
            if not any(True for _ in tenants):
                del self._fresh[one.priority]

    def head(self) -> A | None:
        self._back = [one for one in self._back if not one.done]
        before = min(self._back, key=lambda one: (one.priority, one.number), default=None)
        for priority in sorted(self._fresh):
            if before is not None and before.priority <= priority:
                break
            if (one := self._fresh[priority].head()) is not None:
                return one
            del self._fresh[priority]
        return before

    def pop(self) -> A:
        """Take the head. IndexError if there is none."""
        one = self.head()
        if one is None:
            raise IndexError("waiting line: is empty; look at head() first")
        if one in self._back:
            self._back.remove(one)
            return one
        return self._fresh[one.priority].pop()
