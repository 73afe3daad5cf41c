"""The processes of a tensor-parallel model: started, watched and ended by the one that serves, or by one on each further machine.

A rank is worth nothing alone. If one ends, the model is lost, and so is this process: `lost` says so at once, and what hangs in a sum that
will never be complete gets `GRACE_S` to end. The loss of another machine shows in the next sum. The supervisor of these processes starts
others (a LeaderWorkerSet those of all machines together); requests resume elsewhere.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from rootward.engine.parallel import Group, Nodes, Place, meeting_point
from rootward.errors import ConfigurationError, ModelLost

log = logging.getLogger(__name__)

GRACE_S = 10.0
Load = Callable[..., Any]  # load(group=…) makes the model of a rank; can be pickled


class Ranks:
    """Rank 0's view. `group` is its own membership; `lost` is done when a rank is known to have ended."""

    def __init__(self, group: Group, processes: Sequence[BaseProcess]):
        """`processes`: the other ranks of this machine."""
        self.group, self.processes, self.lost = group, processes, group.lost
        self._closing, self._closed = threading.Event(), threading.Event()
        self.lost.add_done_callback(lambda _: threading.Thread(target=self._end, name="end", daemon=True).start())
        if processes:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @classmethod
    def start(cls, size: int, load: Load, device: str, nodes: Nodes | None = None) -> Ranks:
        """`load` is run by every other rank; the caller loads its own with `group`, at the same time. `nodes`: of all ranks, of which this
        is the first; the others have `Followers`."""
        nodes = nodes or Nodes()
        store = meeting_point(nodes, size)
        places = _places(replace(nodes, port=store.port), size)
        processes = _started(places[1:], load, device)  # first: a group waits until it is complete
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
        self.group.mark_lost()

    def _end(self) -> None:
        if not self._closed.wait(GRACE_S):
            os._exit(1)


class Followers:
    """The ranks of a machine other than the first, which compute until rank 0 ends them."""

    def __init__(self, size: int, load: Load, device: str, nodes: Nodes):
        self._news, self._say = multiprocessing.Pipe(duplex=False)  # a message of each rank that has loaded
        self._processes = _started(_places(nodes, size), load, device, self._say)

    def wait(self, loaded: Callable[[], object]) -> None:
        """Until all have ended; `loaded` is called once all have loaded. ModelLost if one failed: the others are ended with it."""
        running = {process.sentinel: process for process in self._processes}
        loading = len(running)
        while running:
            for event in wait([self._news, *running]):
                if event is self._news:
                    self._news.recv_bytes()
                    loading -= 1
                    if not loading:
                        loaded()
                    continue
                process = running.pop(event)  # type: ignore[arg-type]  # sentinels are integers here
                process.join()
                if process.exitcode:
                    self.kill()
                    raise ModelLost(f"{process.name} of the model ended (exit code {process.exitcode})")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


def _places(nodes: Nodes, size: int) -> list[Place]:
    """Of the ranks on this machine."""
    per_node = size // nodes.count
    first = nodes.index * per_node
    return [Place(first + i, size, per_node, nodes.host, nodes.port) for i in range(per_node)]


def _started(places: Sequence[Place], load: Load, device: str, say: Connection | None = None) -> list[BaseProcess]:
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        spawn.Process(target=run_rank, args=(place, load, device, say), name=f"rank {place.index}", daemon=True)
        for place in places
    ]
    for process in processes:
        process.start()
    return processes


def run_rank(place: Place, load: Load, device: str, say: Connection | None) -> None:
    """The life of a rank other than 0. It ends when rank 0 says so or is gone, not by a signal meant for the whole service. `say`: that it
    has loaded."""
    from rootward.host import as_rank

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    as_rank(place.index, place.size, per_node=place.per_node)
    group = Group(place, device)
    try:
        model = load(group=group)
    except ConfigurationError as wrong:
        sys.exit(wrong.exit_code)  # rank 0 says the same
    if say is not None:
        say.send_bytes(b"loaded")
    try:
        model.follow()
    except (RuntimeError, ValueError) as wrong:
        line = str(wrong).strip().splitlines()[0]
        sys.exit(f"rootward rank {place.index}: rank 0 is gone or out of step ({line})")
    group.close()
