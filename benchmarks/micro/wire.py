"""What wire, codec and scheduling add to a round, against a bare gRPC echo of the same bytes.

    python benchmarks/micro/wire.py [--rounds 2000] [--out FILE.json]

A round goes from the commits of all sessions until their trees have come to rest in this process, which holds the verifier's end of
the link; its beginning, until the first growth of every session is in its tree. Added is the time that it takes, less

    the engine   the drafter's commits and levels in this round, counted in its process around those calls alone. By processor time, so
                 that whatever they wait for is added: the interpreter's lock, but also the processor, which anything else on the machine
                 may have. And by the clock, which leaves out both; a level of a table runs in the drafter's event loop, where there is
                 no lock to wait for. Which of the two a percentile should be read by, the machine decides: `perf sched` tells
    the trees    re-rooting them here, and receiving the frames that something waits for: those of the first growth, and the last ones
                 (the others are received while the engine goes on)

which a drafter in this process would cost as well. What is left: coding both ways, the wire, both event loops, the way to a growth
thread and back, what they wait for each other, and the accounts of link and service.

The echo is a bare grpc.aio bidirectional stream to another process, on the event loop that services run: for a round as many messages
of the same bytes as the round had, for its beginning one each way. Rounds and echoes alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.environment import described
from benchmarks.processes import address_of
from drafter_service.__main__ import main as drafter_main
from drafter_service.growing import Grower
from rootward.core.frames import Grow, Hello
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode, Rule, Stopping, VerifierRequest
from rootward.engine.threads import use_threads
from rootward.wire.channel import DRAFTING, client_options, server_options
from rootward.wire.clients import RemoteDrafter
from verifier_service.link import Link, Shape
from verifier_service.sessions import Draft, Session

LONGEST, WARM_UP = 1000, 100  # rounds of one drafter process: a table has 4096 positions
VOCAB, NODES, ATOMS, DEPTH, TOPK = 512, 64, 32, 8, 4
TABLE = f"tabular:vocab={VOCAB},seed=1,order=1,sharpness=3"
DRAFT = f"{TABLE},noise=0.6,noise_seed=2"
LAWS = {"sampled": (Rule.TRAVERSAL, DraftMode.SAMPLED), "coupled": (Rule.MATCH, DraftMode.COUPLED)}
PARTS = "first", "whole", "first_by_clock", "whole_by_clock"  # of a round: its beginning, all of it

Times = tuple[
    float, ...
]  # seconds, of the beginning of a round and of all of it; then both with the engine by the clock


class Ledger:
    """Seconds of the drafter's engine by both clocks, summed up over the life of its process: an entry for every level, in a file that
    both map."""

    SHAPE = 1 << 20, 2

    def __init__(self, path: Path) -> None:
        if not path.exists():
            np.zeros(self.SHAPE).tofile(path)
        self.after: NDArray[np.float64] = np.memmap(path, dtype=np.float64, mode="r+", shape=self.SHAPE)
        self.levels = 0
        self._seconds = np.zeros(2)

    def engine(self, step: Callable[..., Any], *, level: bool) -> Callable[..., Any]:
        """A call of the engine, counted (the drafter's side)."""

        def counted(*args: Any) -> Any:
            start_s = time.perf_counter(), time.thread_time()
            done = step(*args)
            self._seconds += time.thread_time() - start_s[1], time.perf_counter() - start_s[0]
            if level:
                self.levels += 1
                self.after[self.levels] = self._seconds
            return done

        return counted

    def news(self) -> tuple[Times, Times]:
        """Seconds by either clock until the end of the first level since the last look, and since then in all (this side; the engine
        stands still)."""
        before, known = self.after[self.levels], self.levels
        while self.after[self.levels + 1, 0]:
            self.levels += 1
        first, whole = self.after[known + 1] - before, self.after[self.levels] - before
        return tuple(first.tolist()), tuple(whole.tolist())


class Trees:
    """Seconds of the trees of this process: of commits, and of receiving what came last."""

    def __init__(self) -> None:
        self.commits_s = self.receive_s = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        commit, receive = LivingTree.commit, LivingTree.receive

        def timed_commit(tree: LivingTree, tokens: Sequence[int]) -> Any:
            start_s = time.perf_counter()
            done = commit(tree, tokens)
            self.commits_s += time.perf_counter() - start_s
            return done

        def timed_receive(tree: LivingTree, frame: Grow) -> Any:
            start_s = time.perf_counter()
            done = receive(tree, frame)
            self.receive_s += time.perf_counter() - start_s
            return done

        with patch.object(LivingTree, "commit", timed_commit), patch.object(LivingTree, "receive", timed_receive):
            yield


class Remote:
    """Sessions at a drafter in another process, whose rounds are committed together."""

    def __init__(self, law: str, num_sessions: int, ledger: Ledger) -> None:
        rule, drawn = LAWS[law]
        texts = [(1, 2, i) for i in range(num_sessions)]
        self._sessions = [
            Session(i, VerifierRequest(f"r{i}", text, stopping=Stopping(1 << 20)), rule, drawn, frozenset())
            for i, text in enumerate(texts)
        ]
        self.drafts: list[Draft] = []
        self._ledger, self._trees = ledger, Trees()
        self._first = self._whole = (0.0, 0.0)  # when, and how long the trees took to receive what came last
        self._rest = asyncio.Event()

    async def opened(self, link: Link) -> None:
        self.link = link
        self.drafts = [link.open(session, Shape(ATOMS, NODES, DEPTH, TOPK)) for session in self._sessions]
        link.flush()
        await self.rest()
        self._ledger.news()

    def grown(self) -> None:
        """A frame has been applied."""
        now = time.perf_counter(), self._trees.receive_s
        self._trees.receive_s = 0.0
        if not self._first[0] and all(draft.committed_s is None for draft in self.drafts):
            self._first = now
        if self.drafts and all(draft.at_rest for draft in self.drafts):
            self._whole = now
            self._rest.set()

    async def rest(self) -> None:
        await asyncio.wait_for(self._rest.wait(), 20)

    async def round(self) -> Times:
        """Added time of its beginning and of all of it. What is committed is the first node drawn, twice: the tree below it goes."""
        self._rest.clear()
        self._first, self._trees.commits_s = (0.0, 0.0), 0.0
        with self._trees.counted():
            start_s = time.perf_counter()
            for draft in self.drafts:
                token = next(iter(draft.tree.nodes.values())).token
                self.link.commit(draft, (token, token))
            self.link.flush()
            await self.rest()
        known = start_s + self._trees.commits_s
        parts = list(zip((self._first, self._whole), self._ledger.news(), strict=True))
        return tuple(when_s - known - receive_s - engine[i] for i in (0, 1) for (when_s, receive_s), engine in parts)


class Echo:
    """A bare bidirectional stream to `address`: so many bytes there, so many back in so many messages."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=client_options(DRAFTING))
        self._call = self._channel.stream_stream("/echo/Run")()

    async def round_trip_s(self, there: int, messages: int, back: int) -> float:
        asked = messages.to_bytes(4, "little") + back.to_bytes(4, "little")
        start_s = time.perf_counter()
        await self._call.write(asked + bytes(max(0, there - len(asked))))
        for _ in range(messages):
            await self._call.read()
        return time.perf_counter() - start_s

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def serve_echo() -> None:
    async def answer(messages: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for message in messages:
            count, total = (int.from_bytes(message[at : at + 4], "little") for at in (0, 4))
            for _ in range(count):
                yield bytes(total // count)

    server = grpc.aio.server(options=server_options(DRAFTING))
    method = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Run": method}),))
    print(f"listening on 127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


@dataclass
class Wire:
    """Sizes of the messages since the last look, by direction."""

    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def __call__(self, direction: str, num_bytes: int) -> None:
        getattr(self, direction).append(num_bytes)

    def taken(self) -> tuple[list[int], list[int]]:
        found, self.sent, self.received = (self.sent, self.received), [], []
        return found


@asynccontextmanager
async def linked(law: str, num_sessions: int, wire: Wire) -> AsyncIterator[Remote]:
    """Trees at rest, at a drafter that is a process."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        path = Path(stack.enter_context(TemporaryDirectory())) / "ledger"
        remote = Remote(law, num_sessions, Ledger(path))
        flags = "--listen", "127.0.0.1:0", "--model", DRAFT, "--max-num-seqs", str(num_sessions)
        drafter = RemoteDrafter(
            await enter(address_of(sys.executable, __file__, "--drafter", str(path), *flags)), on_frame=wire
        )
        link = Link("d", await enter(drafter), lambda: Hello("bench", 1, "", VOCAB, 1 << 20), remote.grown)
        running = asyncio.create_task(link.run())
        while link.ack is None:
            await asyncio.sleep(0.01)
        await remote.opened(link)
        yield remote
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def serve_drafter(path: str, flags: Sequence[str]) -> int:
    """A drafter whose engine writes down what it takes."""
    ledger = Ledger(Path(path))
    Grower.commit = ledger.engine(Grower.commit, level=False)  # type: ignore[method-assign]
    Grower.level = ledger.engine(Grower.level, level=True)  # type: ignore[method-assign]
    return drafter_main(flags)


@dataclass
class Found:
    """Of all rounds: the sizes of their messages, by direction; what was added; what the echoes took."""

    sizes: list[tuple[list[int], list[int]]] = field(default_factory=list)
    added: list[Times] = field(default_factory=list)
    echoes: list[Times] = field(default_factory=list)


async def compared(law: str, num_sessions: int, num_rounds: int) -> dict[str, float]:
    """What is added to a round and to its beginning, the echoes, and the ratios."""
    found = Found()
    for done in range(0, num_rounds, LONGEST):
        await alternated(law, num_sessions, min(LONGEST, num_rounds - done), found)
    of_all = asked(found.sizes), quantiles(found.added, found.echoes)
    return {"sessions": num_sessions, "num_rounds": num_rounds, **of_all[0], **of_all[1]}


async def alternated(law: str, num_sessions: int, num_rounds: int, found: Found) -> None:
    """Rounds of one drafter process, and between them echoes of as many bytes as its warm-up had."""
    wire, warm = Wire(), len(found.sizes)
    async with linked(law, num_sessions, wire) as remote, AsyncExitStack() as stack:
        echo = Echo(await stack.enter_async_context(address_of(sys.executable, __file__, "--echo")))
        stack.push_async_callback(echo.close)
        for _ in range(WARM_UP):
            wire.taken()
            await remote.round()
            found.sizes.append(wire.taken())
            await echo.round_trip_s(64, 16, 1024)
        there, first, messages, back = asked(found.sizes[warm:]).values()
        for _ in range(num_rounds):
            found.added.append(await remote.round())
            bare = await echo.round_trip_s(there, 1, first), await echo.round_trip_s(there, messages, back)
            found.echoes.append(bare * 2)


def asked(sizes: list[tuple[list[int], list[int]]]) -> dict[str, int]:
    """What an echo has: medians of rounds."""
    return {
        "bytes_there": middle(sum(sent) for sent, _ in sizes),
        "bytes_first": middle(received[0] for _, received in sizes),
        "messages_back": middle(len(received) for _, received in sizes),
        "bytes_back": middle(sum(received) for _, received in sizes),
    }


def middle(numbers: Iterable[int]) -> int:
    return int(np.median(list(numbers)))


def quantiles(added: list[Times], echoes: list[Times]) -> dict[str, float]:
    """In milliseconds, by part of the round."""
    found: dict[str, float] = {}
    for part, name in enumerate(PARTS):
        for q in (50, 99):
            ours, bare = (1e3 * np.percentile([times[part] for times in both], q) for both in (added, echoes))
            if part < 2:
                found |= {f"{name}_added_p{q}_ms": round(float(ours), 3), f"{name}_echo_p{q}_ms": round(float(bare), 3)}
            found[f"{name}_ratio_p{q}"] = round(float(ours / bare), 2)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    use_threads(1)
    gc.collect()
    gc.freeze()  # as a service does at its start
    report = {**described(), "rounds": []}
    for law in given.laws:
        for num_sessions in given.sessions:
            report["rounds"].append({"law": law, **await compared(law, num_sessions, given.rounds)})
            print(json.dumps(report["rounds"][-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--echo"]:
            uvloop.run(serve_echo())
        case ["--drafter", path, *flags]:
            sys.exit(serve_drafter(path, flags))
        case _:
            uvloop.run(main())
