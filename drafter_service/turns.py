"""Where a level of growth runs: in the event loop if it is known to be short, else on a thread.

A hand-over to the thread and back takes some 0.1 ms, and two threads that both run Python wait for each other's turn at the interpreter,
up to 5 ms a time. A level of tables or look-ups is not worth that. A level of a model is: it would hold up heartbeats, health checks and,
in one process with a verifier, its rounds, and its arithmetic leaves the interpreter to the loop.

Known is what has no weights, and then the clock decides. (A table that is told to sleep, for a benchmark, sleeps here too if it is short.)
The first levels run on the thread, and those that turn out long in the loop send the next ones back to it. A level that begins with text
to read (a prompt, a tree that is opened again) is for the thread. On the thread a level looks longer than it is, by what it waits for the
interpreter: the bounds leave room for it.
"""

from __future__ import annotations

from rootward.ports import ModelInfo

SHORT_S = 3e-3  # for a tree
LONGEST_S = 5e-3  # for any number of trees: as long as one thread of Python may keep another waiting
FEW_UNREAD = 64  # committed tokens: those of a round, for several trees
MEMORY = 0.1  # weight of the newest level
LOOP_TURNS = 3  # given to the loop after a level in it: from the socket to the mailbox a frame goes through two tasks


class LevelCost:
    """Seconds of a level, lately."""

    def __init__(self, info: ModelInfo) -> None:
        self._weightless = info.num_parameters == 0
        self._seconds: float | None = None

    def took(self, took_s: float) -> None:
        """One more level that grew something."""
        self._seconds = took_s if self._seconds is None else self._seconds + MEMORY * (took_s - self._seconds)

    def short(self, num_trees: int, num_unread: int) -> bool:
        """The next level is known to be, for so many trees with so many committed tokens to read."""
        most_s = min(SHORT_S * max(num_trees, 1), LONGEST_S)
        known = self._weightless and self._seconds is not None and self._seconds < most_s
        return known and num_unread <= FEW_UNREAD
