"""Tensor parallelism: one network on several processes (ranks), each with a part of the heads and of every large matrix.

Rank 0 is the process that serves. It alone has slots, requests, verdicts and random numbers. Before each forward it broadcasts the inputs,
and all ranks run the same network; each keeps K and V of its heads in its own storage, at the same cells. So ranks have no state that could
diverge. Inputs are sent over sockets (gloo), independently of the backend of the network's own collectives.

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
from rootward.errors import ConfigurationError, ModelLost, first_line
from rootward.ports import Reduction

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
IDLE_TIMEOUT = timedelta(days=365)  # between two steps; the loss of a rank is noticed by its closed socket
MAX_MESSAGE_BYTES = 1 << 28  # far above the message of the largest forward
# For all ranks to be started; machines may download first. Their supervisor sets a shorter bound, such as a startup probe.
START_TIMEOUT = timedelta(days=1)
STEP_TIMEOUT = timedelta(minutes=5)  # for the slowest collective of a forward or of loading


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines that share a model, as in torchrun: their number and the index of this one, each with as many ranks. `host`, `port`:
    address of rank 0's store, which the first machine opens (port 0: any free one)."""

    count: int = 1
    index: int = 0
    host: str = "127.0.0.1"
    port: int = 0


class Group:
    """Membership of this process in the ranks of a model. At most one per process."""

    def __init__(self, index: int, size: int, *, nodes: Nodes, device: str, store: Any = None):
        """`index` of `size` ranks. `store`: rank 0's own (`open_store`)."""
        kind = torch.device(device).type
        if kind not in BACKENDS:
            raise ConfigurationError(f"device: {device!r} cannot share a model between ranks; use cpu or cuda")
        if kind == "cpu" and torch.cuda.is_available():
            raise ConfigurationError("device: with tensor_parallel a machine with GPUs uses them; set device to cuda")
        store = store or open_store(nodes, size, is_master=False)
        self.index, self.size = index, size
        self.lost: Future[None] = Future()  # done when the loss of a rank is noticed
        assemble(store, index, size)
        dist.init_process_group(BACKENDS[kind], store=store, rank=index, world_size=size, timeout=STEP_TIMEOUT)
        self._control = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def broadcast(self, message: AnyMessage) -> None:
        """Rank 0: send a message to the others, which wait in `receive`."""
        data = np.frombuffer(encode(message), np.uint8)
        for part in (np.array([len(data)], np.int64), data):
            dist.broadcast(torch.from_numpy(part.copy()), src=0, group=self._control)

    def receive(self) -> AnyMessage:
        """Another rank than 0: the next message. RuntimeError if rank 0 is gone; ValueError if the message is invalid."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._control)
        if not 0 < int(size) <= MAX_MESSAGE_BYTES:
            raise ValueError(f"rank 0 announces {int(size)} bytes; a message has at most {MAX_MESSAGE_BYTES}")
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._control)
        return decode(data.numpy().tobytes())

    def agreed(self, report: ProbeReport) -> ProbeReport:
        """Rank 0's report, on every rank. All ranks call it at the same point."""
        if self.leads:
            self.broadcast(Probed(report=report))
            return report
        message = self.receive()
        if not isinstance(message, Probed):
            raise RuntimeError(f"rank 0 is out of step: it sent {message.do!r} while the model is loaded")
        return message.report

    def mark_lost(self) -> None:
        with suppress(InvalidStateError):  # noticed twice: by its process and by a step
            self.lost.set_result(None)

    def dismiss(self) -> None:
        """Rank 0: end the other ranks, which wait for the next step."""
        self.broadcast(Done())

    def close(self) -> None:
        dist.destroy_process_group()


def open_store(nodes: Nodes, size: int, *, is_master: bool) -> Any:
    """The store of rank 0, its `master`, through which ranks find each other."""
    store = dist.TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it
    return store(nodes.host, nodes.port, size, is_master=is_master, wait_for_workers=False, timeout=START_TIMEOUT)


def assemble(store: Any, index: int, size: int) -> None:
    """Wait until every rank has been started; from then on STEP_TIMEOUT applies."""
    store.set(f"started/{index}", "")
    store.wait([f"started/{other}" for other in range(size)], START_TIMEOUT)
    store.set_timeout(STEP_TIMEOUT)


class LeadingPass:
    """Runs a forward on all ranks, driven by rank 0. After any error ranks may be out of step, so the model is lost."""

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
            why = f"{type(wrong).__name__}: {first_line(wrong)}"
            raise ModelLost(f"a rank of the model is gone or out of step: {why}") from wrong


@torch.inference_mode()
def follow(own: ForwardPass | LeadingPass, group: Group) -> None:
    """Another rank than 0: run the forwards of rank 0 until it sends `Done`. RuntimeError if it is gone."""
    while True:
        message = group.receive()
        if isinstance(message, Done):
            return
        if isinstance(message, Probed):
            raise RuntimeError("rank 0 is out of step: it loads its model once more")
        getattr(own, message.do)(*message.arguments())


def check_shape(config: Any, size: int) -> None:
    """ConfigurationError unless every rank gets as many heads as the others."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ConfigurationError(
            f"tensor_parallel: {size} ranks cannot share {heads} heads and {kv_heads} KV heads evenly; use a number that divides both"
        )


def whole(weight: torch.Tensor) -> torch.Tensor:
    """The full tensor of a weight that is sharded over ranks, which all call this; any other weight unchanged."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()
