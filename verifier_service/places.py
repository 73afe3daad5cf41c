"""Who holds KV and who waits for it: sessions that run, those that wait for a place, those that had to give theirs up.

Everything here happens in the loop task, between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rootward.ports import LanguageModel
from verifier_service.memory import Memory
from verifier_service.sessions import Session
from verifier_service.waiting import WaitingLine


class Places:
    """`running`: sessions with a KV slot, by number."""

    def __init__(self, model: LanguageModel, memory: Memory) -> None:
        self.model, self.memory = model, memory
        self.running: dict[int, Session] = {}
        self.num_preemptions = self.num_asked = self.num_cached = 0  # the latter in tokens, by the prefix cache
        self._waiting: WaitingLine[Session] = WaitingLine()
        self._away: dict[int, Session] = {}  # preempted ones: they wait, and may still hold a tree at a drafter

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def gauges(self) -> dict[str, float]:
        """What is worth watching, by the names of serving.md."""
        total, free = self.model.num_blocks, self.model.num_free_blocks
        return {
            "num_requests_running": float(len(self.running)),
            "num_requests_waiting": float(self.num_waiting),
            "num_preemptions_total": float(self.num_preemptions),
            "kv_cache_usage_ratio": 1.0 - free / total,
            "prefix_cache_queries_total": float(self.num_asked),
            "prefix_cache_hits_total": float(self.num_cached),
        }

    def wait(self, session: Session) -> None:
        self._waiting.push(session)

    @property
    def num_fresh(self) -> int:
        """Requests that wait and have not run yet: what the length of the queue is counted by."""
        return self._waiting.num_fresh

    def forget(self, session: Session) -> None:
        """It has ended; if it waits it waits no longer."""
        self._waiting.discard(session)

    def fill(self, failed: Callable[[Session, Exception], None]) -> list[Session]:
        """Give the next in line a place while slots and blocks suffice. Nobody overtakes one for whom there is no room yet.

        failed(session, error): the model would not take it; that costs the one session.
        """
        entered = []
        while (session := self._waiting.head()) is not None and self.memory.admits(session, self.running.values()):
            self._waiting.pop()
            try:
                session.kv_slot = self.model.open(session.tokens, salt=session.salt)
            except Exception as error:
                failed(session, error)  # one that was preempted stays away until `sweep`: it may hold a tree
                continue
            self._away.pop(session.number, None)
            # Of a text that begins alike, or its own before it was preempted.
            session.fed = self.model.length(session.kv_slot)
            if session.num_cached is None:
                session.num_cached = min(session.fed, len(session.request.prompt))
            self.num_asked += len(session.tokens)
            self.num_cached += session.fed
            self.running[session.number] = session
            entered.append(session)
        return entered

    def preempt(self, numbers: Iterable[int]) -> None:
        """These give their KV to others; what is committed is computed again. Round, cap and the tree that waits stay as they are:
        memory decides this, but whether a tree still waits depends on its values (docs/decisions/0005)."""
        for number in numbers:
            session = self._leave(number)
            if session.local is not None:
                session.local.tree = (
                    None  # it comes back with prefill, and has no rows for a tree that was looked up before
                )
            self._away[number] = session
            self._waiting.push_front(session)
            self.num_preemptions += 1

    def sweep(self) -> list[Session]:
        """Take their KV from those that are done; returns them and any that were done while they had none."""
        ended = [self._leave(s.number) for s in list(self.running.values()) if s.done]
        gone = [s for s in self._away.values() if s.done]
        for session in gone:
            del self._away[session.number]
        return ended + gone

    def _leave(self, number: int) -> Session:
        session = self.running.pop(number)
        assert session.kv_slot is not None
        self.model.close(session.kv_slot)
        session.kv_slot, session.fed = None, 0
        return session
