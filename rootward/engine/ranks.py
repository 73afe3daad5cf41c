"""The processes of a tensor-parallel model: started, watched and ended by the serving process, or by one process on each other machine.

If one rank ends, the model is lost and this process ends too: `lost` is done at once, and a thread in a collective gets `GRACE_S`.
The loss of another machine is noticed in the next collective. The supervisor of these processes restarts them (a LeaderWorkerSet those of
all machines together); requests resume on other verifiers.
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

from rootward.engine.parallel import Group, Nodes, open_store
from rootward.errors import ConfigurationError, ModelLost, first_line

log = logging.getLogger(__name__)

GRACE_S = 10.0
Load = Callable[..., Any]  # load(group=…) returns the model of a rank; picklable


class Ranks:
    """The ranks, owned by rank 0. `group`: its membership; `lost`: done when the loss of a rank is noticed."""

    def __init__(self, group: Group, processes: Sequence[BaseProcess]):
        """`processes`: the other ranks of this machine."""
        self.group, self.processes, self.lost = group, processes, group.lost
        self._closing, self._closed = threading.Event(), threading.Event()
        self.lost.add_done_callback(lambda _: threading.Thread(target=self._end, name="end", daemon=True).start())
        if processes:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @classmethod
    def start(cls, size: int, load: Load, device: str, nodes: Nodes | None = None) -> Ranks:
        """Start the other ranks of this machine. They call `load` while the caller loads its own model with `group`. `nodes`: the machines
        of all ranks; this is the first, the others run `Followers`."""
        nodes = nodes or Nodes()
        store = open_store(nodes, size, is_master=True)
        nodes = replace(nodes, port=store.port)
        processes = _started(size, load, device, nodes=nodes)  # first: a group waits until it is complete
        return cls(Group(0, size, nodes=nodes, device=device, store=store), processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The other ranks are dismissed, or killed if they do not end."""
        self._closing.set()
        sound = error is None and not self.lost.done()
        if sound:
            # fails if a rank has just ended; the others must be ended nevertheless
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
    """The ranks of a machine other than the first. They run until rank 0 dismisses them."""

    def __init__(self, size: int, load: Load, device: str, nodes: Nodes):
        self._loaded, self._report_loaded = multiprocessing.Pipe(duplex=False)  # a message of each rank that has loaded
        self._processes = _started(size, load, device, nodes=nodes, report_loaded=self._report_loaded)

    def wait(self, loaded: Callable[[], object]) -> None:
        """Wait until all have ended; `loaded` is called once all have loaded. ModelLost if one fails; the others are then killed."""
        running = {process.sentinel: process for process in self._processes}
        loading = len(running)
        while running:
            for event in wait([self._loaded, *running]):
                if event is self._loaded:
                    self._loaded.recv_bytes()
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


def _started(
    size: int, load: Load, device: str, *, nodes: Nodes, report_loaded: Connection | None = None
) -> list[BaseProcess]:
    """The ranks of this machine, without rank 0, which is the caller."""
    spawn, per_node = multiprocessing.get_context("spawn"), size // nodes.count
    processes: list[BaseProcess] = [
        spawn.Process(
            target=run_rank, args=(index, size, load, device, nodes, report_loaded), name=f"rank {index}", daemon=True
        )
        for index in range(nodes.index * per_node, (nodes.index + 1) * per_node)
        if index > 0
    ]
    for process in processes:
        process.start()
    return processes


def run_rank(index: int, size: int, load: Load, device: str, nodes: Nodes, report_loaded: Connection | None) -> None:
    """Main function of a rank other than 0. It ends when rank 0 dismisses it or is gone; it ignores signals, which are sent to all
    processes of a service. `report_loaded`: gets a message when the model is loaded."""
    from rootward.host import as_rank

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    as_rank(index, size, per_node=size // nodes.count)
    group = Group(index, size, nodes=nodes, device=device)
    try:
        model = load(group=group)
    except ConfigurationError as wrong:
        sys.exit(wrong.exit_code)  # rank 0 reports the same error
    if report_loaded is not None:
        report_loaded.send_bytes(b"loaded")
    try:
        model.follow()
    except (RuntimeError, ValueError) as wrong:
        sys.exit(f"rootward rank {index}: rank 0 is gone or out of step ({first_line(wrong)})")
    group.close()
