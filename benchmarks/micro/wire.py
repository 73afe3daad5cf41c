"""What wire, codec and scheduling add to a round, against a bare gRPC echo of the same bytes.

    python benchmarks/micro/wire.py [--rounds 400] [--out FILE.json]

The drafter is a process; this one holds the verifier's end of the link and commits to all its sessions as soon as their trees have come to
rest. Measured is from the commits until the first growth that answers them has been read; the draft forward that made it travels with the
frame (`draft_us`) and is taken off. What is left is added: coding both ways, the wire, both event loops, and the way to the growth thread
and back. The echo is a bare grpc.aio bidirectional stream to another process that sends frames of the same sizes, one each way. Rounds
and echoes alternate, so that a busy machine slows both.

Beside it: tokens per second with the drafter as a process against in-process, over verifiers whose target takes 20 ms a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import numpy as np

from drafter_service.growing import Grower
from drafter_service.service import DrafterService
from rootward.bench.environment import described
from rootward.bench.generations import Load, measured
from rootward.bench.processes import address_of, service
from rootward.core.frames import FromDrafter, Hello, ToDrafter
from rootward.core.growth import Policy as Growing
from rootward.core.requests import Law, Rule, Speculation, SpeculationMode, Stopping, VerifierRequest
from rootward.engine.loading import load_model
from rootward.ports import Drafter
from rootward.rpc.channel import DRAFTING, client_options, server_options
from rootward.rpc.clients import RemoteDrafter
from rootward.rpc.codec import to_pb
from verifier_service.link import Link, Shape
from verifier_service.policy import Policy
from verifier_service.service import VerifierService
from verifier_service.sessions import Session

MOST, LEAST_REMOTE = 2.5, 0.95
TABLE = "tabular:vocab=2048,seed=1,order=1,sharpness=3"
DRAFT = f"{TABLE},noise=0.6,noise_seed=2"
VOCAB, NODES, ATOMS = 2048, 64, 32
LAWS = {"sampled": (Rule.TRAVERSAL, Law.SAMPLED), "coupled": (Rule.MATCH, Law.COUPLED)}


class Counted:
    """A drafter; the first answer to a commit: its bytes, when it came, and how long the drafter computed for it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.asked = self.counting = False
        self.num_bytes = [0, 0]
        self.arrived_s, self.work_us = 0.0, 0

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        async def outbound() -> AsyncIterator[ToDrafter]:
            async for frame in inbound:
                self._count(0, frame)
                yield frame

        async for frame in self._drafter.session(outbound()):
            if self.asked and frame.grows:
                self.arrived_s, self.asked = time.perf_counter(), False
                self.work_us = max(grow.draft_us for grow in frame.grows)
                self._count(1, frame)
            yield frame

    def _count(self, direction: int, frame: ToDrafter | FromDrafter) -> None:
        if self.counting:
            self.num_bytes[direction] += to_pb(frame).ByteSize()


class Rounds:
    """Sessions at one drafter whose rounds are committed together."""

    def __init__(self, link: Link, drafter: Counted, grown: asyncio.Event, law: str, num_sessions: int) -> None:
        self.link, self.drafter, self.grown = link, drafter, grown
        rule, drawn = LAWS[law]
        sessions = [
            Session(i, VerifierRequest(f"r{i}", (1, 2, i), stopping=Stopping(1 << 20)), rule, drawn, frozenset())
            for i in range(num_sessions)
        ]
        self.drafts = [link.open(session, Shape(ATOMS, NODES, max_depth=8, topk=4)) for session in sessions]
        link.flush()

    async def rest(self) -> None:
        while not all(draft.at_rest for draft in self.drafts):
            self.grown.clear()
            await asyncio.wait_for(self.grown.wait(), 20)

    async def added_s(self) -> float:
        """Seconds from a commit to its first growth, less what the drafter computed. Returns when all trees are at rest again."""
        self.drafter.asked = True
        start_s = time.perf_counter()
        for draft in self.drafts:
            first = next(iter(draft.tree.nodes.values())).token
            self.link.commit(draft, (first, first))
        self.link.flush()
        await self.rest()
        return self.drafter.arrived_s - start_s - self.drafter.work_us / 1e6


class Echo:
    """A bare bidirectional stream to `address`: so many bytes there, so many back."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=client_options(DRAFTING))
        self._call = self._channel.stream_stream("/echo/Run")()

    async def round_trip_s(self, there: int, back: int) -> float:
        start_s = time.perf_counter()
        await self._call.write(back.to_bytes(4, "little") + bytes(max(0, there - 4)))
        await self._call.read()
        return time.perf_counter() - start_s

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def serve_echo() -> None:
    async def answer(messages: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for message in messages:
            yield bytes(int.from_bytes(message[:4], "little"))

    server = grpc.aio.server(options=server_options(DRAFTING))
    method = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Run": method}),))
    print(f"listening on 127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


async def compared(law: str, num_sessions: int, num_rounds: int) -> dict[str, float]:
    """Added time of rounds and time of echoes, as quantiles in milliseconds, and their ratios."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        address = await enter(service("drafter_service", "--model", DRAFT, "--max-num-seqs", str(num_sessions)))
        echo = Echo(await enter(address_of(sys.executable, __file__, "--echo")))
        stack.push_async_callback(echo.close)
        counted = Counted(await enter(RemoteDrafter(address)))
        grown = asyncio.Event()
        link = Link("d", counted, lambda: Hello("bench", 1, "", VOCAB, 1 << 20), grown.set)
        running = asyncio.create_task(link.run())
        while link.ack is None:
            await asyncio.sleep(0.01)
        rounds = Rounds(link, counted, grown, law, num_sessions)
        await rounds.rest()
        counted.counting = True
        for _ in range(num_rounds // 4):  # warm-up, and the bytes
            await rounds.added_s()
        counted.counting = False
        there, back = (n // (num_rounds // 4) for n in counted.num_bytes)
        added, echoes = [], []
        for _ in range(num_rounds):
            added.append(await rounds.added_s())
            echoes.append(await echo.round_trip_s(there, back))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    found = {"sessions": num_sessions, "bytes_there": there, "bytes_back": back}
    for quantile in (50, 99):
        ours, bare = (1e3 * np.percentile(values, quantile) for values in (added, echoes))
        found |= {f"added_p{quantile}_ms": ours, f"echo_p{quantile}_ms": bare, f"ratio_p{quantile}": ours / bare}
    return {name: round(float(value), 3) for name, value in found.items()}


@asynccontextmanager
async def deployed(remote: bool) -> AsyncIterator[VerifierService]:
    """A verifier with its drafter in this process, or as another."""
    target = load_model(f"{TABLE},step_ms=20", max_slots=8)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        if remote:
            drafter: Drafter = await enter(RemoteDrafter(await enter(service("drafter_service", "--model", DRAFT))))
        else:
            model = load_model(DRAFT, max_slots=8)
            grower: Grower = Grower(model, incarnation=7, policy=Growing(Law.SAMPLED))
            drafter = await enter(DrafterService(model, grower, worker="drafter", capacity=8))
        policy = Policy(draft_wait_s=5.0)
        verifier = VerifierService(target, {"d": drafter}, worker="verifier", incarnation=3, policy=policy)
        await enter(verifier)
        while not verifier.pool.up:
            await asyncio.sleep(0.01)
        yield verifier


async def remote_of_local(law: str, num_sessions: int = 4) -> float:
    """Tokens per second with the drafter as a process, over those with it in this one; median of turns."""
    ratios: list[float] = []
    wish = Speculation(SpeculationMode.REQUIRED, *LAWS[law])
    async with deployed(False) as local, deployed(True) as remote:
        for turn in range(6):
            load = Load(num_sessions, 80, wish, f"{law}-{turn}")
            near, far = [await measured(system, load) for system in (local, remote)]
            if turn:
                ratios.append(far.rate / near.rate)
    return round(float(np.median(ratios)), 3)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.echo:
        return await serve_echo()
    report = {**described(), "rounds": [], "remote_of_local": {}}
    for law in LAWS:
        for num_sessions in given.sessions:
            report["rounds"].append({"law": law, **await compared(law, num_sessions, given.rounds)})
            print(json.dumps(report["rounds"][-1]), flush=True)
        report["remote_of_local"][law] = await remote_of_local(law)
        print(law, "remote over in-process:", report["remote_of_local"][law], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
