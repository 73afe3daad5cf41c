"""`rootward bench distance`: tokens per second against the round-trip time between verifier and drafter.

A verifier and a drafter run as processes; between them lies a link with that much delay (`benchmarks.slow_link`). The models are
tables whose forward passes take a set time, so that a laptop can have the step time of a large target. Seven systems:

    plain                no drafter
    traversal waiting    every round waits for its whole tree, nothing grows ahead; trees sampled and verified by ratio tests
    traversal not ahead  the launch rule of protocol.md 1.3, nothing grows ahead
    traversal            the living tree: the launch rule, and growth ahead
    coupled …            the same three with trees drawn with the target's noise and verified by match

All of them run, idle but for one, and take turns at every distance. The results are ratios within a turn: their median, and an interval
that assumes no distribution.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results import Interval, command, interval, markdown_row, markdown_table, save
from benchmarks.services import Load, free_port, measured, scraped, service, verifier_with_drafters
from benchmarks.slow_link import Conditions, SlowLink
from benchmarks.turns import balanced_order
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode
from rootward.errors import ConfigurationError
from rootward.wire.clients import RemoteVerifier

TABLE = "tabular:vocab=2048,seed=1,order=1,sharpness=3"
RTTS_MS = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0)
LONGEST_WAIT_MS = 5000.0
WARM_UP = 0.5  # of a measurement, so that what a verifier learns it learns before
LAWS = {"traversal": (Rule.TRAVERSAL, DraftMode.SAMPLED), "coupled": (Rule.MATCH, DraftMode.COUPLED)}
WAITS, NOT_AHEAD = " waiting", " not ahead"
COLUMNS = (
    "turn",
    "system",
    "round trip, ms",
    "tokens/s",
    "per round",
    "with a tree",
    "root guessed",
    "bytes per round",
)
COMMITS = ("rootward_draft_commits_total:grown", "rootward_draft_commits_total:new")


@dataclass(frozen=True)
class System:
    """A way of decoding, and the flags of the verifier that serves it."""

    name: str
    speculation: Speculation
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """One system at one distance: tokens per second, tokens per round, share of rounds with a tree, share of commits whose root had
    been grown, bytes on the wire per round."""

    system: str
    rtt_ms: float
    turn: int
    rate: float
    tokens: float
    with_tree: float
    guessed: float
    wire_bytes: float


def systems(ahead: int) -> Iterator[System]:
    yield System("plain", Speculation(SpeculationMode.DISABLED))
    grows = ("--num-ahead-tokens", str(ahead))
    waits = ("--draft-wait-ms", str(LONGEST_WAIT_MS), "--num-ahead-tokens", "0")
    for name, law in LAWS.items():
        yield System(name + WAITS, Speculation(SpeculationMode.REQUIRED, *law), waits)
        yield System(name + NOT_AHEAD, Speculation(SpeculationMode.AUTO, *law), ("--num-ahead-tokens", "0"))
        yield System(name, Speculation(SpeculationMode.AUTO, *law), grows)


@dataclass(frozen=True)
class Deployment:
    """A running system: its verifier, the admin port of that, and the link to its drafter."""

    system: System
    verifier: RemoteVerifier
    admin: str
    link: SlowLink

    async def point(self, rtt_ms: float, turn: int, given: argparse.Namespace) -> Point:
        self.link.conditions = Conditions(rtt_ms / 2e3, given.jitter_ms / 1e3, given.loss)
        tokens = given.max_tokens // (3 if self.system.name == "plain" else 1)  # a token takes it a whole step
        name = f"{self.system.name}-{rtt_ms:g}-{turn}".replace(" ", "-")
        load = Load(given.sessions, tokens, self.system.speculation, name, seed=turn * given.sessions)
        await measured(self.verifier, load.scaled(WARM_UP))
        then, bytes_then = await asyncio.to_thread(scraped, self.admin), sum(self.link.num_bytes)
        run = await measured(self.verifier, load)
        now, wire_bytes = await asyncio.to_thread(scraped, self.admin), sum(self.link.num_bytes) - bytes_then
        grown, new = (now[name] - then[name] for name in COMMITS)
        guessed, per_round = grown / max(grown + new, 1), wire_bytes / max(run.rounds, 1)
        return Point(self.system.name, rtt_ms, turn, run.rate, run.block_efficiency, run.with_tree, guessed, per_round)


@asynccontextmanager
async def running(system: System, given: argparse.Namespace) -> AsyncIterator[Deployment]:
    """The system's own verifier and drafter, and the link between them."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        draft = f"{TABLE},noise={given.noise},noise_seed=2,step_ms={given.draft_ms}"
        address = await enter(service("drafter_service", "--model", draft))
        link = await enter(SlowLink(address))
        admin = f"127.0.0.1:{free_port()}"
        target = f"{TABLE},step_ms={given.verify_ms}"
        shape = ("--num-draft-tokens", str(given.nodes), "--max-num-seqs", str(given.sessions))
        flags = ("--model", target, "--drafters", link.address, "--admin-listen", admin, *shape, *system.flags)
        verifier = await enter(verifier_with_drafters(await enter(service("verifier_service", *flags)), 1))
        yield Deployment(system, verifier, admin, link)


async def points(given: argparse.Namespace) -> list[Point]:
    """All systems at all distances, turn after turn, printed as they come."""
    found: list[Point] = []
    async with AsyncExitStack() as stack:
        deployments = [await stack.enter_async_context(running(system, given)) for system in systems(given.ahead)]
        for turn in range(given.turns):
            for rtt_ms in given.rtts:
                for deployment in balanced_order(deployments, turn):
                    found.append(await deployment.point(rtt_ms, turn, given))
                    print(_line(found[-1]), flush=True)
    return found


def ratio(found: Sequence[Point], above: tuple[str, float], below: tuple[str, float]) -> Interval:
    """Ratio of tokens per second, turn by turn, of two (system, round trip in ms)."""
    rates = {(point.system, point.rtt_ms, point.turn): point.rate for point in found}
    turns = sorted({point.turn for point in found})
    return interval([rates[*above, turn] / rates[*below, turn] for turn in turns])


def claims(found: Sequence[Point], rtt_ms: float) -> dict[str, Interval]:
    """Rates at this distance as ratios to the rate at zero, to that of waiting for each tree, and to that without growth ahead."""
    found_for: dict[str, Interval] = {}
    for name in LAWS:
        if rtt_ms:
            found_for[f"{name} of zero"] = ratio(found, (name, rtt_ms), (name, 0.0))
        for other in (WAITS, NOT_AHEAD):
            found_for[f"{name} of{other}"] = ratio(found, (name, rtt_ms), (name + other, rtt_ms))
    return found_for


@command
def main(argv: Sequence[str]) -> None:
    given = _parser().parse_args(argv)
    if 0.0 not in given.rtts:
        raise ConfigurationError("--rtts: need 0 among them; everything is compared with zero distance")
    print(markdown_table(COLUMNS, []))
    found = asyncio.run(points(given))
    ratios = {f"{rtt_ms:g}": claims(found, rtt_ms) for rtt_ms in given.rtts}
    for rtt_ms, values in ratios.items():
        for name, value in values.items():
            print(f"{rtt_ms} ms, {name}: {value}")
    if given.out is not None:
        settings = {name: value for name, value in vars(given).items() if name != "out"}
        kept = {rtt: {name: value._asdict() for name, value in values.items()} for rtt, values in ratios.items()}
        report = {"settings": settings, "claims": kept, "points": [asdict(point) for point in found]}
        save(given.out / "distance.json", report)


def _line(point: Point) -> str:
    shares = (f"{point.with_tree:.2f}", f"{point.guessed:.2f}", f"{point.wire_bytes:.0f}")
    numbers = (f"{point.rtt_ms:g}", f"{point.rate:.1f}", f"{point.tokens:.2f}", *shares)
    return markdown_row((point.turn, point.system, *numbers))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootward bench distance",
        description="Tokens per second against the round-trip time between verifier and drafter.",
        allow_abbrev=False,
    )
    parser.add_argument("--rtts", type=float, nargs="+", default=RTTS_MS, help="round-trip times in ms, 0 among them")
    parser.add_argument("--verify-ms", type=float, default=60.0, help="a step of the target (default 60)")
    parser.add_argument("--draft-ms", type=float, default=4.0, help="a level of the draft (default 4)")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="of each direction, on top (default 0)")
    parser.add_argument("--loss", type=float, default=0.0, help="share of segments that arrive a round trip later")
    parser.add_argument("--noise", type=float, default=0.6, help="what sets the draft's logits apart (default 0.6)")
    parser.add_argument("--nodes", type=int, default=16, help="nodes verified in a round (default 16)")
    parser.add_argument("--ahead", type=int, default=192, help="nodes a living tree grows ahead (default 192)")
    parser.add_argument("--sessions", type=int, default=2, help="at once (default 2)")
    parser.add_argument("--max-tokens", type=int, default=160, help="tokens of a session (default 160)")
    parser.add_argument("--turns", type=int, default=5, help="of all systems at all distances (default 5)")
    parser.add_argument("--out", type=Path, help="folder of distance.json (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
