"""Ends processes whose parent was killed and could not end them itself.

The parent runs this file as one more process and writes to its standard input, a line each: the id of a process that it has started, and
the same below zero once that has ended. The input ends when the parent does; processes that are left then get SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self


class Guard:
    """The process, from entering to leaving."""

    def __enter__(self) -> Self:
        # In a session of its own: signals to the group of the parent, as Ctrl-C, do not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-IS", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
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


def main() -> None:
    running: set[int] = set()
    for number in map(int, sys.stdin):
        running.discard(-number)
        if number > 0:
            running.add(number)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
