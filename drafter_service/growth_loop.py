"""The drafter as an object: streams in, frames out, one growth loop for all of them.

The event loop reads and writes streams. Growth runs on a worker thread: it takes received frames from a queue (the mailbox) and hands its
answers to the event loop; neither waits for the other. The mailbox is emptied before every level. A Commit is therefore applied after at
most one draft forward, and branches that it cuts off are not grown further.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import structlog
from prometheus_client import CollectorRegistry

import rootward
from drafter_service.metrics import GAUGES, Key, Spans
from drafter_service.stream import Stream
from rootward.clock import Watchdog
from rootward.core.frames import (
    PROTOCOL,
    Commit,
    DraftHead,
    FromDrafter,
    Grow,
    Hello,
    HelloAck,
    Launch,
    Load,
    NeedSync,
    Open,
    OpenFeatures,
    Reject,
    ToDrafter,
)
from rootward.core.requests import BEST_FIRST, DraftStrategy
from rootward.demand import DemandCollector
from rootward.metrics import Gauges
from rootward.ports import DEFAULT_POOL, DrafterInfo, ModelInfo

if TYPE_CHECKING:  # a drafter without a model loads no torch
    from drafter_service.head_grower import HeadGrower
    from drafter_service.lookup_grower import LookupGrower
    from rootward.engine.grower import Grower

log = structlog.get_logger("drafter")

Mail = tuple[Stream, ToDrafter | None, float]  # stream, received frame (None: the stream has ended), time of reception
Answer = tuple[Stream, Grow | NeedSync | Reject]

MAX_FAILURES = 5  # consecutive failed levels after which the process ends
RETRY_MS = 1000  # minimum wait of a verifier before it repeats a rejected Open
LOAD_S = 0.25  # between reports of load on a stream
QUEUE_MEMORY = 0.1  # weight of the newest waiting time in their mean
MAX_LOGGED = 300  # characters of a text of the verifier
UNFAIR = 2  # a verifier gives up a tree if it holds at least this many more than the one that opens another

Terms = tuple[ModelInfo, str]  # model as announced to this verifier; reason for a refusal ("": accepted)
Agree = Callable[[Hello, ModelInfo], Terms]
# All living trees of one drafter, called on one thread. `level` does a bounded piece of work, so that no commit is applied late.
Trees: TypeAlias = "Grower[Key] | HeadGrower | LookupGrower"


class DrafterService:
    """Implements `ports.Drafter` on top of a grower. Use as an async context manager: it owns the growth loop and its thread.

    agree: decides which verifiers are accepted. strategy: the default of requests that name none. head: the draft head of the grower
    and the format of its features; verifiers without the same head are refused.
    """

    def __init__(
        self,
        grower: Trees,
        *,
        capacity: int,
        max_atoms: int = 64,
        agree: Agree | None = None,
        pool: str = DEFAULT_POOL,
        strategy: DraftStrategy = BEST_FIRST,
        head: DraftHead | None = None,
    ) -> None:
        self.grower, self.pool = grower, pool
        self.worker = f"drafter-{grower.incarnation:016x}"
        self.capacity, self.max_atoms, self.strategy = capacity, max_atoms, strategy
        self._agree, self.head = agree or partial(with_model, head=head), head
        self.draining = False
        self.watchdog = Watchdog()
        self.registry = CollectorRegistry()  # its own, so that several drafters can live in one process
        Gauges(self.registry, GAUGES, self._gauges)
        self.registry.register(DemandCollector(lambda: {pool: grower.demand}))
        self._mailbox: SimpleQueue[Mail | None] = SimpleQueue()  # None: the growth loop ends
        self._spans = Spans()
        # Time in the mailbox of each tree's newest Open or Commit, until its growth is sent.
        self._queued_s: dict[Key, float] = {}
        self._queue_s = 0.0  # exponentially weighted mean time of frames in the mailbox
        self._streams: dict[int, Stream] = {}
        self._num_streams = self._num_failures = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="growth")
        self._growth: asyncio.Future[None] | None = None
        self._beat_task: asyncio.Task[None] | None = None

    def describe(self) -> DrafterInfo:
        """The answer to GetInfo: model, handshake and load."""
        return DrafterInfo(self.grower.info, self._answer(None), self._load(None), rootward.__version__, time.time())

    async def __aenter__(self) -> DrafterService:
        loop = asyncio.get_running_loop()
        self._growth = loop.run_in_executor(self._thread, self._grow, loop)
        self._beat_task = asyncio.create_task(self._beat_forever(), name="heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._mailbox.put(None)
        if self._beat_task is not None:
            self._beat_task.cancel()
        await asyncio.gather(*filter(None, (self._beat_task, self._growth)), return_exceptions=True)
        self._thread.shutdown(wait=True)

    def _gauges(self) -> dict[str, float]:
        num_trees = len(self.grower.trees)
        return {
            "drafter_sessions_open": num_trees,
            "drafter_sessions_cap": self.capacity,
            "drafter_rows_used_ratio": num_trees / self.capacity,
            "drafter_streams": len(self._streams),
        }

    # -- streams ------------------------------------------------------------------------------------------------------

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        """Serve the stream of one verifier: received frames go to the mailbox, answers come from `Stream.take`. An error of `inbound` ends
        the stream, and is raised after the answers that wait."""
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
                if stream.ended:  # the verifier closed its side and must not wait for answers
                    await reader  # which raises what has ended `inbound`
                    return
        finally:
            reader.cancel()
            self._streams.pop(stream.number, None)
            self._post(stream, None)

    @property
    def ended(self) -> asyncio.Future[None] | None:
        """Completes when growth has failed permanently; the process should end then."""
        return self._growth

    @property
    def alive(self) -> bool:
        """False if only a restart can help."""
        return self._growth is not None and not self._growth.done() and self.watchdog.healthy

    async def drain(self) -> None:
        """Refuse new sessions, report this to all verifiers, and return when they have moved their sessions away."""
        self.draining = True
        self._report_load()
        while self.grower.trees:
            await asyncio.sleep(0.02)

    async def _read(self, stream: Stream, inbound: AsyncIterator[ToDrafter]) -> None:
        try:
            async for frame in inbound:
                if frame.hello is not None:
                    stream.ack, stream.load, stream.greeted = self._answer(frame.hello), self._load(stream), True
                    stream.ready.set()
                if frame.opens or frame.commits or frame.closes or frame.features or frame.launches or frame.unreadable:
                    self._post(stream, frame)
                await stream.room()
        finally:
            stream.ended = True
            stream.ready.set()

    def _post(self, stream: Stream, frame: ToDrafter | None) -> None:
        stream.num_unapplied += 1
        self._mailbox.put((stream, frame, time.monotonic()))

    def _answer(self, hello: Hello | None) -> HelloAck:
        info, refusal = self.grower.info, ""
        if hello is not None:
            info, refusal = self._agree(hello, info)
            if refusal:
                log.warning("pairing_refused", verifier=hello.worker[:MAX_LOGGED], reason=refusal[:MAX_LOGGED])
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

    def _load(self, stream: Stream | None) -> Load:
        """The report of load to the verifier of this stream, or to a caller without one."""
        keys = list(self.grower.trees)  # one operation: the growth thread opens and closes trees meanwhile
        return Load(
            sessions=len(keys),
            capacity=self.capacity,
            queue_us=int(1e6 * self._queue_s),
            incarnation=self.grower.incarnation,
            draining=self.draining,
            own_sessions=None if stream is None else sum(number == stream.number for number, _ in keys),
        )

    def _report_load(self) -> None:
        for stream in self._streams.values():
            if stream.greeted:
                stream.load = self._load(stream)
                stream.ready.set()

    async def _beat_forever(self) -> None:
        """Report the load periodically. Verifiers use it to place and move sessions."""
        while True:
            await asyncio.sleep(LOAD_S)
            self._queue_s *= 1 - QUEUE_MEMORY  # decays while no frames arrive
            self._report_load()

    # -- the growth loop ----------------------------------------------------------------------------------------------

    def _grow(self, loop: asyncio.AbstractEventLoop) -> None:
        """The growth loop. It and all methods that it calls directly run on the worker thread."""
        while (mail := self._take_mail(wait=self.grower.idle)) is not None:
            loop.call_soon_threadsafe(self._deliver, mail, self._step(mail))

    def _step(self, mail: list[Mail]) -> list[Answer]:
        """Apply received frames, then grow one level. Returns the answers."""
        with self.watchdog.step():
            return self._apply_mail(mail) + self._grow_level()

    def _take_mail(self, *, wait: bool) -> list[Mail] | None:
        """All frames in the mailbox; if it is empty and `wait`, the next one. None: the service closes."""
        mail: list[Mail] = []
        while not self._mailbox.empty() or (wait and not mail):
            if (one := self._mailbox.get()) is None:
                return None
            mail.append(one)
        return mail

    def _deliver(self, applied: list[Mail], answers: list[Answer]) -> None:
        """On the event loop: note the applied frames and queue the answers for sending."""
        for stream, _, _ in applied:
            stream.note_applied()
        for stream, message in answers:
            stream.put(message)

    def _apply_mail(self, mail: list[Mail]) -> list[Answer]:
        out: list[Answer] = []
        now_s = time.monotonic()
        for stream, frame, received_s in mail:
            if frame is None:
                for key in [key for key in self.grower.trees if key[0] == stream.number]:
                    self._close(key)
                continue
            out += self._apply(stream, frame)
            slots = [message.slot for message in frame.opens] + [message.slot for message in frame.commits]
            keys = [(stream.number, slot) for slot in slots]
            self._queued_s |= {key: now_s - received_s for key in keys if key in self.grower.trees}
            self._queue_s += QUEUE_MEMORY * (now_s - received_s - self._queue_s)
        return out

    def _grow_level(self) -> list[Answer]:
        """Grow one level. An exception costs all trees but not the process: verifiers decode plainly and open new ones."""
        try:
            frames = self.grower.level()
        except Exception:
            log.exception("level_failed")
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise  # the model does not recover: the process ends, and its supervisor starts another
            return [answer for key in list(self.grower.trees) for answer in self._give_up(key, "internal error")]
        if frames:  # a level without trees is no sign of recovery
            self._num_failures = 0
        out: list[Answer] = []
        for key, grow in frames:
            if (owner := self._streams.get(key[0])) is not None:
                queued_s = self._queued_s.pop(key, 0.0)
                sent = replace(grow, queue_us=int(1e6 * queued_s)) if queued_s else grow
                self._spans.grew(key, sent)
                out.append((owner, sent))
        return out

    def _close(self, key: Key) -> None:
        try:
            self.grower.close(key)
        except Exception:
            log.exception("close_failed")
        self._spans.closed(key)
        self._queued_s.pop(key, None)

    def _apply(self, stream: Stream, frame: ToDrafter) -> list[Answer]:
        """Apply one frame of a verifier. An invalid message closes its own slot only."""
        out: list[Answer] = [(stream, reject) for reject in frame.unreadable]
        for slot in [close.slot for close in frame.closes] + [reject.slot for reject in frame.unreadable]:
            self._close((stream.number, slot))
        messages: tuple[Commit | Open | OpenFeatures | Launch, ...]
        messages = *frame.commits, *frame.opens, *frame.features, *frame.launches
        for message in messages:
            try:
                out += self._open(stream, message) if isinstance(message, Open) else self._advance(stream, message)
            except Exception:
                log.exception("message_failed", kind=type(message).__name__)
                out += self._give_up((stream.number, message.slot), "internal error")
        return out

    def _advance(self, stream: Stream, message: Commit | OpenFeatures | Launch) -> list[Answer]:
        key = stream.number, message.slot
        answers: Sequence[Grow | NeedSync | Reject]
        if isinstance(message, Commit):
            answers = self.grower.commit(key, message)
        elif isinstance(message, Launch):
            self.grower.launch(key, message)
            answers = []
        else:
            refused = self.grower.add_features(key, message)
            answers = [] if refused is None else [refused]
        if any(isinstance(answer, Reject) for answer in answers):
            self._close(key)
        return [(stream, answer) for answer in answers]

    def _open(self, stream: Stream, message: Open) -> list[Answer]:
        if message.num_atoms > self.max_atoms:  # the cost of one tree would delay all others
            fault = f"num_atoms: {message.num_atoms} is above {self.max_atoms}; ask for no more than the HelloAck says"
            return [(stream, Reject(message.slot, fault))]
        # Before room is made: no other verifier gives up a tree for it.
        if fault := self.grower.fault((stream.number, message.slot), message):
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
        """Close the newest tree of the verifier that holds most, if the asking one holds fewer. The session opens a tree at another drafter
        or decodes plainly."""
        loser = gives_up(Counter(number for number, _ in self.grower.trees), asking)
        if loser is None:
            return []
        return self._give_up((loser, max(slot for number, slot in self.grower.trees if number == loser)), "fair share")

    def _give_up(self, key: Key, reason: str) -> list[Answer]:
        self._close(key)
        owner = self._streams.get(key[0])
        return [] if owner is None else [(owner, Reject(key[1], reason, retry_after_ms=RETRY_MS))]


def gives_up(held: Mapping[int, int], asking: int) -> int | None:
    """The verifier that gives up a tree so that `asking` can open one on a full drafter, None if none holds UNFAIR more.

    held: number of trees by verifier stream."""
    fullest = max(held, key=held.__getitem__, default=None)
    if fullest is None or held[fullest] < held.get(asking, 0) + UNFAIR:
        return None
    return fullest


def with_model(hello: Hello, info: ModelInfo, *, head: DraftHead | None = None) -> Terms:
    """Terms of a drafter with a model: tokenizer and vocabulary must equal the target's. The verifier must send features for its head."""
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
    elif head is not None and hello.head != head.fingerprint:
        refusal = (
            f"head: drafter has {head.fingerprint[:12]}, verifier {hello.head[:12] or 'none'}; "
            "start the verifier with --draft-head FOLDER of the same head"
        )
    return info, refusal


def without_model(hello: Hello, info: ModelInfo) -> Terms:
    """Terms of a look-up drafter: it accepts every vocabulary, because it proposes tokens of the verifier's own texts."""
    as_target = replace(
        info,
        vocab_size=hello.vocab_size,
        max_positions=min(hello.max_positions, info.max_positions),
        tokenizer_hash=hello.tokenizer_hash,
    )
    return as_target, _protocol(hello)


def _protocol(hello: Hello) -> str:
    if hello.protocol == PROTOCOL:
        return ""
    return f"protocol: verifier speaks {hello.protocol}, drafter {PROTOCOL}; run the same release on both sides"
