"""The drafter as an object: streams in, frames out, one growth loop for all of them.

The event loop moves frames. Growth runs on a worker thread, takes frames out of a mailbox and leaves its own with the event loop; neither
waits for the other. Between two levels the mailbox is emptied, so a Commit is never older than one draft forward when it is applied, and
work for a branch that died stops there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import structlog

import rootward
from drafter_service.metrics import Metrics, Spans
from drafter_service.stream import Stream
from rootward.core.frames import (
    PROTOCOL,
    Commit,
    DraftHead,
    FromDrafter,
    Grow,
    Hello,
    HelloAck,
    Load,
    NeedSync,
    Open,
    OpenFeatures,
    Reject,
    ToDrafter,
)
from rootward.core.requests import BEST_FIRST, DraftStrategy
from rootward.demand import DemandCollector
from rootward.ports import DEFAULT_POOL, DrafterInfo, ModelInfo
from rootward.watchdog import Watchdog

if TYPE_CHECKING:  # a drafter without a model loads no torch
    from drafter_service.lookup_grower import LookupGrower
    from rootward.engine.grower import Grower

log = structlog.get_logger("drafter")

Key = tuple[int, int]  # (stream, slot)
Mail = tuple[Stream, ToDrafter | None, float]  # what came on a stream, and when; None: it has ended
Answer = tuple[Stream, Grow | NeedSync | Reject]

MAX_FAILURES = 5  # levels in a row that failed
RETRY_MS = 1000  # what a refused verifier is asked to wait, at least
LOAD_S = 0.25  # between heartbeats on a stream
QUEUE_MEMORY = 0.1  # weight of the newest wait


UNFAIR = 2  # trees that the fullest verifier must hold more than the one that asks, before it gives one up

Terms = tuple[ModelInfo, str]  # how the drafter presents itself; why they cannot work together ("" if they can)
Agree = Callable[[Hello, ModelInfo], Terms]
# All living trees of one drafter, called on one thread. `level` does a bounded piece of work, so that no commit is applied late.
Trees: TypeAlias = "Grower[Key] | LookupGrower[Key]"


class DrafterService:
    """Implements `ports.Drafter` around whatever grows its trees. Use as an async context manager: it owns the growth loop and its thread.

    agree: which verifiers it works with. strategy: that it grows by when a request names none. head: that it drafts with, and how it wants
    features; verifiers without the same head are refused.
    """

    def __init__(
        self,
        grower: Trees,
        *,
        worker: str,
        capacity: int,
        max_atoms: int = 64,
        agree: Agree | None = None,
        pool: str = DEFAULT_POOL,
        strategy: DraftStrategy = BEST_FIRST,
        head: DraftHead | None = None,
    ) -> None:
        self.grower, self.worker, self.pool = grower, worker, pool
        self.capacity, self.max_atoms, self.strategy = capacity, max_atoms, strategy
        self._agree, self.head = agree or with_model, head
        self.draining = False
        self.watchdog = Watchdog()
        self.metrics = Metrics()
        self.metrics.watch(
            lambda: {
                "drafter_sessions_open": len(self.grower.trees),
                "drafter_sessions_cap": self.capacity,
                "drafter_rows_used_ratio": len(self.grower.trees) / self.capacity,
                "drafter_streams": len(self._streams),
            }
        )
        self.metrics.registry.register(DemandCollector(lambda: {pool: grower.demand}))
        self._mailbox: SimpleQueue[Mail | None] = SimpleQueue()  # None: growth ends
        self._spans = Spans()
        self._waited: dict[Key, float] = {}  # of trees whose growth under the newest base has not been sent: that wait
        self._queue_s = 0.0  # how long frames wait for their turn, lately
        self._streams: dict[int, Stream] = {}
        self._num_streams = self._num_failures = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="growth")
        self._growth: asyncio.Task[None] | None = None
        self._beat_task: asyncio.Task[None] | None = None

    @property
    def info(self) -> ModelInfo:
        return self.grower.info

    def describe(self) -> DrafterInfo:
        """What this drafter tells outside a stream."""
        return DrafterInfo(self.info, self._answer(None), self._load(), rootward.__version__, time.time())

    async def __aenter__(self) -> DrafterService:
        self._growth = asyncio.create_task(self._grow_forever(), name="growth")
        self._beat_task = asyncio.create_task(self._beat_forever(), name="heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._mailbox.put(None)
        if self._beat_task is not None:
            self._beat_task.cancel()
        await asyncio.gather(*filter(None, (self._beat_task, self._growth)), return_exceptions=True)
        self._thread.shutdown(wait=True)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        """One verifier's stream: its frames go to the mailbox, ours come from the stream's outbox."""
        self._num_streams += 1
        stream = Stream(self._num_streams, self.capacity)
        self._streams[stream.number] = stream
        reader = asyncio.create_task(self._read(stream, inbound))
        try:
            while True:
                await stream.ready.wait()
                if (frame := stream.take()) is not None:
                    yield frame
                    if frame.ack is not None and frame.ack.refusal:
                        return
                if stream.ended:  # nothing more is heard from this verifier: it must not wait for answers
                    return
        finally:
            reader.cancel()
            self._streams.pop(stream.number, None)
            self._post(stream, None)

    @property
    def ended(self) -> asyncio.Future[None] | None:
        """Done when growth has failed for good; the process should end then."""
        return self._growth

    @property
    def alive(self) -> bool:
        """False: only a restart helps."""
        return self._growth is not None and not self._growth.done() and self.watchdog.healthy

    async def drain(self) -> None:
        """Refuse new sessions, say so, and return when every verifier has moved its sessions away."""
        self.draining = True
        self._tell_load()
        while self.grower.trees:
            await asyncio.sleep(0.02)

    async def _read(self, stream: Stream, inbound: AsyncIterator[ToDrafter]) -> None:
        try:
            async for frame in inbound:
                if frame.hello is not None:
                    stream.ack, stream.load, stream.greeted = self._answer(frame.hello), self._load(), True
                    stream.ready.set()
                if frame.opens or frame.commits or frame.closes or frame.features or frame.unreadable:
                    self._post(stream, frame)
                await stream.room()
        finally:
            stream.ended = True
            stream.ready.set()

    def _post(self, stream: Stream, frame: ToDrafter | None) -> None:
        stream.unheard += 1
        self._mailbox.put((stream, frame, time.monotonic()))

    def _answer(self, hello: Hello | None) -> HelloAck:
        info, refusal = self._agree(hello, self.info) if hello is not None else (self.info, "")
        if hello is not None and not refusal and self.head is not None:
            refusal = without_features(hello, self.head)
        if refusal and hello is not None:
            log.warning("pairing_refused", verifier=hello.worker, reason=refusal)
        return HelloAck(
            self.worker,
            self.grower.incarnation,
            info.tokenizer_hash,
            info.vocab_size,
            info.max_positions,
            self.grower.modes,
            self.capacity,
            self.max_atoms,
            refusal,
            strategy=self.strategy,
            head=self.head,
        )

    def _load(self) -> Load:
        queue_us = int(1e6 * self._queue_s)
        return Load(len(self.grower.trees), self.capacity, queue_us, self.grower.incarnation, self.draining)

    def _tell_load(self) -> None:
        for stream in self._streams.values():
            if stream.greeted:
                stream.load = self._load()
                stream.ready.set()

    async def _beat_forever(self) -> None:
        """Verifiers place and move sessions by what drafters say of their load."""
        while True:
            await asyncio.sleep(LOAD_S)
            self._queue_s *= 1 - QUEUE_MEMORY  # nothing waits while nothing comes
            self._tell_load()

    # -- the growth loop ----------------------------------------------------------------------------------------------

    async def _grow_forever(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._grow, loop)

    def _grow(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the worker thread, with everything it calls."""
        while (mail := self._mail(wait=self.grower.idle)) is not None:
            loop.call_soon_threadsafe(self._deliver, mail, self._turn(mail))

    def _turn(self, mail: list[Mail]) -> list[Answer]:
        """Apply the mail, then grow one level."""
        with self.watchdog.step():
            return self._heard(mail) + self._grown()

    def _mail(self, *, wait: bool) -> list[Mail] | None:
        """Everything that waits, at least one if there is nothing else to do. None: the service closes."""
        mail: list[Mail] = []
        while not self._mailbox.empty() or (wait and not mail):
            if (one := self._mailbox.get()) is None:
                return None
            mail.append(one)
        return mail

    def _deliver(self, heard: list[Mail], answers: list[Answer]) -> None:
        for stream, _, _ in heard:
            stream.heard()
        for stream, message in answers:
            stream.put(message)

    def _heard(self, mail: list[Mail]) -> list[Answer]:
        """Apply the mail."""
        out: list[Answer] = []
        now_s = time.monotonic()
        for stream, frame, came_s in mail:
            if frame is None:
                self._gone(stream)
                continue
            out += self._apply(stream, frame)
            slots = [message.slot for message in frame.opens] + [message.slot for message in frame.commits]
            keys = [(stream.number, slot) for slot in slots]
            self._waited |= {key: now_s - came_s for key in keys if key in self.grower.trees}
            self._queue_s += QUEUE_MEMORY * (now_s - came_s - self._queue_s)
        return out

    def _grown(self) -> list[Answer]:
        """One level. A bug in it must cost the trees, not the drafter: verifiers decode plainly and open new ones."""
        try:
            frames = self.grower.level()
        except Exception:
            log.exception("level_failed")
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise  # a model that never recovers: the process ends, and whoever supervises it starts another
            return self._uproot()
        if frames:  # a level of no trees proves nothing
            self._num_failures = 0
        out: list[Answer] = []
        for key, grow in frames:
            if (owner := self._streams.get(key[0])) is not None:
                waited_s = self._waited.pop(key, 0.0)
                told = replace(grow, queue_us=int(1e6 * waited_s)) if waited_s else grow
                self._spans.grew(key, told)
                out.append((owner, told))
        return out

    def _gone(self, stream: Stream) -> None:
        for key in [k for k in self.grower.trees if k[0] == stream.number]:
            self._close(key)
        self._spans.left(stream.number)

    def _close(self, key: Key) -> None:
        try:
            self.grower.close(key)
        except Exception:
            log.exception("close_failed")
        self._spans.closed(key)
        self._waited.pop(key, None)

    def _apply(self, stream: Stream, frame: ToDrafter) -> list[Answer]:
        """One frame of a verifier. What is wrong with one message costs its slot and nothing else."""
        out: list[Answer] = [(stream, reject) for reject in frame.unreadable]
        for slot in [close.slot for close in frame.closes] + [reject.slot for reject in frame.unreadable]:
            self._close((stream.number, slot))
        messages: tuple[Commit | Open | OpenFeatures, ...] = (*frame.commits, *frame.opens, *frame.features)
        for message in messages:
            try:
                out += self._open(stream, message) if isinstance(message, Open) else self._advance(stream, message)
            except Exception:
                log.exception("message_failed", kind=type(message).__name__)
                self._close((stream.number, message.slot))
                out.append((stream, Reject(message.slot, "internal error", retry_after_ms=RETRY_MS)))
        return out

    def _advance(self, stream: Stream, message: Commit | OpenFeatures) -> list[Answer]:
        key = stream.number, message.slot
        answers = self.grower.commit(key, message) if isinstance(message, Commit) else self._features(key, message)
        if any(isinstance(answer, Reject) for answer in answers):
            self._close(key)
        return [(stream, answer) for answer in answers]

    def _features(self, key: Key, message: OpenFeatures) -> Sequence[Reject]:
        add_features = getattr(self.grower, "add_features", None)
        if add_features is None:
            return [
                Reject(message.slot, "features: this drafter takes none; send them where the HelloAck names a head")
            ]
        refused = add_features(key, message)
        return [] if refused is None else [refused]

    def _open(self, stream: Stream, message: Open) -> list[Answer]:
        if message.num_atoms > self.max_atoms:  # one tree's row would be everybody's time
            fault = f"num_atoms: {message.num_atoms} is above {self.max_atoms}; ask for no more than the HelloAck says"
            return [(stream, Reject(message.slot, fault))]
        out: list[Answer] = []
        if not self.draining and len(self.grower.trees) >= self.capacity:
            out = self._make_room(stream.number)
        if self.draining or len(self.grower.trees) >= self.capacity:
            reason = "draining" if self.draining else "capacity"
            return [*out, (stream, Reject(message.slot, reason, retry_after_ms=RETRY_MS))]
        if (refused := self.grower.open((stream.number, message.slot), message)) is not None:
            return [*out, (stream, refused)]
        self._spans.opened((stream.number, message.slot), message)
        return out

    def _make_room(self, asking: int) -> list[Answer]:
        """Who holds most gives up its newest tree for a verifier that holds fewer. It drafts elsewhere, or decodes plainly."""
        loser = gives_up(Counter(number for number, _ in self.grower.trees), asking)
        if loser is None:
            return []
        return self._given_up((loser, max(slot for number, slot in self.grower.trees if number == loser)), "fair share")

    def _uproot(self) -> list[Answer]:
        """Give up every tree after a failure of the model."""
        return [answer for key in list(self.grower.trees) for answer in self._given_up(key, "internal error")]

    def _given_up(self, key: Key, reason: str) -> list[Answer]:
        self._close(key)
        owner = self._streams.get(key[0])
        return [] if owner is None else [(owner, Reject(key[1], reason, retry_after_ms=RETRY_MS))]


def gives_up(held: Mapping[int, int], asking: int) -> int | None:
    """The verifier that gives up a tree so that another can open one on a full drafter; None: it is fair as it is."""
    fullest = max(held, key=lambda one: held[one], default=None)
    if fullest is None or held[fullest] < held.get(asking, 0) + UNFAIR:
        return None
    return fullest


def with_model(hello: Hello, info: ModelInfo) -> Terms:
    """A draft model has a vocabulary and a tokenizer of its own, which must be the target's."""
    if refusal := _protocol(hello):
        return info, refusal
    if hello.tokenizer_hash and info.tokenizer_hash and hello.tokenizer_hash != info.tokenizer_hash:
        refusal = (
            f"tokenizer: target has {hello.tokenizer_hash[:12]}, draft {info.tokenizer_hash[:12]}; "
            "start the drafter with --target-tokenizer TARGET, or use a draft model with the target's tokenizer "
            "(`rootward check-pair` shows the first differing token)"
        )
    elif not hello.tokenizer_hash and hello.vocab_size != info.vocab_size:
        refusal = f"vocab_size: target has {hello.vocab_size}, draft {info.vocab_size}; use models of one vocabulary"
    return info, refusal


def without_model(hello: Hello, info: ModelInfo) -> Terms:
    """A drafter that looks things up speaks the verifier's vocabulary: it names tokens that it has seen."""
    as_target = replace(
        info,
        vocab_size=hello.vocab_size,
        max_positions=min(hello.max_positions, info.max_positions),
        tokenizer_hash=hello.tokenizer_hash,
    )
    return as_target, _protocol(hello)


def without_features(hello: Hello, head: DraftHead) -> str:
    """Why a verifier cannot send what this head reads; "": it can."""
    if hello.head == head.fingerprint:
        return ""
    return (
        f"head: drafter has {head.fingerprint[:12]}, verifier {hello.head[:12] or 'none'}; "
        "start the verifier with --draft-head FOLDER of the same head"
    )


def _protocol(hello: Hello) -> str:
    if hello.protocol == PROTOCOL:
        return ""
    return f"protocol: verifier speaks {hello.protocol}, drafter {PROTOCOL}; run the same release on both sides"
