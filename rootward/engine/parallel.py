"""Tensor parallel: one network on several processes, each with its part of the heads and of every large matrix; one of them leads.

Rank 0 is the process that serves. It alone keeps books, sees requests, decides and draws. Before each forward it tells the others what goes
in, and all ranks run the same network; K and V of a rank's heads lie in its own storage, at the same cells everywhere. So there is
nothing on which ranks could come to disagree. What is told travels over sockets (gloo), whatever carries the network's own sums.

Sharding is that of transformers (`DistributedConfig`, the network's own `tp_plan`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rootward.engine.atoms import reduced
from rootward.engine.kv_tree import Moves
from rootward.engine.passes import ForwardPass
from rootward.engine.probe import ProbeReport
from rootward.engine.rank_messages import AnyMessage, Done, Move, Probed, Run, decode, encode
from rootward.engine.slots import Entry
from rootward.errors import ConfigurationError, ModelLost
from rootward.ports import Reduction

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
IDLE = timedelta(days=365)  # a rank may wait as long for the next step; a rank that is gone closes its socket
LONGEST = 1 << 28  # bytes of a message: far above that of the largest forward
START = timedelta(
    days=1
)  # for all ranks to be started; machines may download first. What starts them bounds it, as a startup probe does
STEP = timedelta(minutes=5)  # for the slowest collective of a forward, loading included


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines that share a model, as torchrun counts them, and which of them this is. `host` and `port`: of rank 0's store, which
    only the first opens (port 0: a free one)."""

    count: int = 1
    index: int = 0
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Of a process among those that share a model. `per_node`: how many of them a machine has; `host` and `port`: of rank 0's store."""

    index: int
    size: int
    per_node: int
    host: str
    port: int


class Group:
    """The ranks of one model, as one of them sees them. At most one a process."""

    def __init__(self, place: Place, device: str, store: Any = None):
        """`store`: rank 0's own (`meeting_point`)."""
        kind = torch.device(device).type
        if kind not in BACKENDS:
            raise ConfigurationError(f"device: {device!r} cannot share a model between ranks; use cpu or cuda")
        if kind == "cpu" and torch.cuda.is_available():
            raise ConfigurationError("device: with tensor_parallel a machine with GPUs uses them; set device to cuda")
        if store is None:
            store = _store(place.host, place.port, place.size, is_master=False)
        self.index, self.size = place.index, place.size
        self.lost: Future[None] = Future()  # done when a rank is known to be gone
        assemble(store, place.index, place.size)
        dist.init_process_group(BACKENDS[kind], store=store, rank=place.index, world_size=place.size, timeout=STEP)
        self._control = dist.new_group(backend="gloo", timeout=IDLE)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def broadcast(self, message: AnyMessage) -> None:
        """Rank 0: to the others, each of whom waits in `receive`."""
        data = np.frombuffer(encode(message), np.uint8)
        for part in (np.array([len(data)], np.int64), data):
            dist.broadcast(torch.from_numpy(part.copy()), src=0, group=self._control)

    def receive(self) -> AnyMessage:
        """A rank other than 0. RuntimeError if rank 0 is gone; ValueError for what is no message of ours."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._control)
        if not 0 < int(size) <= LONGEST:
            raise ValueError(f"rank 0 announces {int(size)} bytes; a message has at most {LONGEST}")
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._control)
        return decode(data.numpy().tobytes())

    def agreed(self, report: ProbeReport) -> ProbeReport:
        """Rank 0's, on every rank. All of them call it at the same point."""
        if self.leads:
            self.broadcast(Probed(report=report))
            return report
        told = self.receive()
        if not isinstance(told, Probed):
            raise RuntimeError(f"rank 0 is out of step: it sent {told.do!r} while the model is loaded")
        return told.report

    def mark_lost(self) -> None:
        with suppress(InvalidStateError):  # found by its process, or by the next step
            self.lost.set_result(None)

    def dismiss(self) -> None:
        """Rank 0: the others, who wait for the next step, may end."""
        self.broadcast(Done())

    def close(self) -> None:
        dist.destroy_process_group()


def meeting_point(nodes: Nodes, size: int) -> Any:
    """Where ranks find each other: a store of rank 0 (`port`)."""
    return _store(nodes.host, nodes.port, size, is_master=True)


def _store(host: str, port: int, size: int, *, is_master: bool) -> Any:
    store = dist.TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it
    return store(host, port, size, is_master=is_master, wait_for_workers=False, timeout=START)


def assemble(store: Any, index: int, size: int) -> None:
    """Wait until every rank has been started; from then on none may keep the others for longer than a step."""
    store.set(f"started/{index}", "")
    store.wait([f"started/{other}" for other in range(size)], START)
    store.set_timeout(STEP)


class LeadingPass:
    """`own` on rank 0, and with it on all ranks. After any error the ranks may stand at different places: then all is lost."""

    def __init__(self, own: ForwardPass, group: Group):
        self._own, self._group = own, group

    def run(self, entries: Sequence[Entry], kept: Sequence[range], reduction: Reduction | None = None) -> torch.Tensor:
        return reduced(self._led(Run.of(entries, kept), lambda: self._own.run(entries, kept)), reduction)

    def move(self, moves: Moves) -> None:
        if len(moves.source):
            self._led(Move.of(moves), lambda: self._own.move(moves))

    def expose(self, states: Sequence[int]) -> None:
        self._own.expose(states)  # every rank has whole hidden states

    @property
    def states(self) -> torch.Tensor:
        return self._own.states

    def _led(self, message: Run | Move, call: Callable[[], T]) -> T:
        if self._group.lost.done():
            raise ModelLost("the ranks of the model have been lost; start this process again")
        try:
            self._group.broadcast(message)
            return call()
        except Exception as wrong:
            self._group.mark_lost()
            line = (str(wrong).strip() or "no message").splitlines()[0]
            raise ModelLost(f"a rank of the model is gone or out of step: {type(wrong).__name__}: {line}") from wrong


@torch.inference_mode()
def follow(own: ForwardPass | LeadingPass, group: Group) -> None:
    """A rank other than 0: run what rank 0 runs until it says that it is done (or is gone: RuntimeError)."""
    while True:
        told = group.receive()
        if isinstance(told, Done):
            return
        if isinstance(told, Probed):
            raise RuntimeError("rank 0 is out of step: it loads its model once more")
        getattr(own, told.do)(*told.arguments())


def check_shape(config: Any, size: int) -> None:
    """ConfigurationError unless every rank gets as many heads as the others."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ConfigurationError(
            f"tensor_parallel: {size} ranks cannot share {heads} heads and {kv_heads} KV heads evenly; use a number that divides both"
        )


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight that ranks share, put together: all ranks call it. Any other as it is."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()
