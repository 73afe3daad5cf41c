"""Ends the processes that another one has started when that ends: on SIGTERM itself (`exit_on_sigterm`), after SIGKILL by a `Guard`.

The parent of a guard runs this file as one more process and writes to its standard input, a line each: the id of a process that it has
started, and the same below zero once that has ended. The input ends when the parent does; processes that are left then get SIGTERM, and
those that still run after PATIENCE_S are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

PATIENCE_S = 60.0  # longer than services drain by default
POLL_S = 0.1


class Guard:
    """The process, from entering to leaving."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        # In a session of its own: signals to the group of the parent, as Ctrl-C, do not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(self._patience_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin.fileno()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()

    def started(self, pid: int) -> None:
        """End this process if the parent is killed."""
        self._tell(pid)

    def ended(self, pid: int) -> None:
        """The id may now be that of another process."""
        self._tell(-pid)

    def _tell(self, number: int) -> None:
        with suppress(BrokenPipeError):  # it was killed itself, and nobody guards
            os.write(self._input, b"%d\n" % number)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit in the main thread; by default it ends the process at once, and what it started stays behind."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    running: set[int] = set()
    for number in map(int, sys.stdin):
        running.discard(-number)
        if number > 0:
            running.add(number)
    began = {pid: _began(pid) for pid in running}
    left = _signalled(running, signal.SIGTERM)
    until_s = time.monotonic() + float(sys.argv[1])
    while left and time.monotonic() < until_s:
        time.sleep(POLL_S)
        # The id of one that has ended may now be that of another process.
        left = {pid for pid in _signalled(left, 0) if _began(pid) == began[pid]}
    _signalled(left, signal.SIGKILL)


def _signalled(pids: set[int], number: int) -> set[int]:
    """Those of the processes that run; they get this signal, or none if it is 0."""
    found = set()
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            found.add(pid)
    return found


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine was started; "" for one that has ended, also while nobody has waited for it, and
    where there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # after the name of its program
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


if __name__ == "__main__":
    main()
