"""The processes of a tensor-parallel model: started, watched and ended by the one that serves.

A rank is worth nothing alone. If one ends, the model is lost, and so is this process: `lost` says so at once, and what hangs in a sum that
will never be complete gets `GRACE_S` to end. Whoever supervises this process starts another; requests resume elsewhere.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from rootward.engine.parallel import Group, Place, meeting_point
from rootward.errors import ConfigurationError

log = logging.getLogger(__name__)

GRACE_S = 10.0
Load = Callable[..., Any]  # load(group=…) makes the model of a rank; can be pickled


class Ranks:
    """Rank 0's view. `group` is its own membership; `lost` is done when a process it has started has ended."""

    def __init__(self, group: Group, processes: Sequence[BaseProcess]):
        """`processes`: the other ranks."""
        self.group, self.processes = group, processes
        self.lost: Future[None] = Future()
        self._closing, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @classmethod
    def start(cls, size: int, load: Load, device: str) -> Ranks:
        """`load` is run by every other rank; the caller loads its own with `group`, at the same time."""
        store = meeting_point(size)
        places = [Place(index, size, store.port) for index in range(size)]
        spawn = multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=run_rank, args=(place, load, device), name=f"rank {place.index}", daemon=True)
            for place in places[1:]
        ]
        for process in processes:
            process.start()
        return cls(Group(places[0], device, store), processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The others are told to end if they can hear it, and are ended otherwise."""
        self._closing.set()
        sound = error is None and not self.lost.done()
        if sound:
            # One that ended just now does not hear it; the others must not be left alive for that.
            with suppress(RuntimeError):
                self.group.dismiss()
        for process in self.processes:
            process.join(GRACE_S if sound else 0.0)
            process.kill()
            process.join()
        self.group.close()
        self._closed.set()

    def _watch(self) -> None:
        by_sentinel = {process.sentinel: process for process in self.processes}
        gone = by_sentinel[wait(list(by_sentinel))[0]]  # type: ignore[index]  # sentinels are integers here
        if self._closing.is_set():
            return
        gone.join()
        log.error("%s of the model ended (exit code %s), and so does this process", gone.name, gone.exitcode)
        self.lost.set_result(None)
        if not self._closed.wait(GRACE_S):
            os._exit(1)


def run_rank(place: Place, load: Load, device: str) -> None:
    """The life of a rank other than 0. It ends when rank 0 says so or is gone, not by a signal meant for the whole service."""
    from rootward.settings import as_rank

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    as_rank(place.index, place.size)
    group = Group(place, device)
    try:
        model = load(group=group)
    except ConfigurationError as wrong:
        sys.exit(wrong.exit_code)  # rank 0 says the same
    try:
        model.follow()
    except RuntimeError as wrong:
        line = str(wrong).strip().splitlines()[0]
        sys.exit(f"rootward rank {place.index}: rank 0 is gone or out of step ({line})")
    group.close()
