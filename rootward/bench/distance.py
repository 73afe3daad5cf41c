"""`rootward bench distance`: tokens per second against the round-trip time between verifier and drafter.

A verifier and a drafter run as processes; between them lies a link with that much delay (`rootward.testing.slow_link`). The models are
tables whose forward passes take a set time, so that the step time of a large target is had on a laptop. Four ways of decoding:

    plain       no drafter
    waiting     every round waits for its whole tree, nothing grows ahead
    traversal   the living tree, trees sampled and verified by ratio tests
    coupled     the living tree, trees drawn with the target's noise and verified by match

Beside the measurement stands what distance must cost (`distance_model.py`), with all its constants from the row at zero distance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rootward.bench.distance_model import Fit, fitted
from rootward.bench.generations import Load, measured
from rootward.bench.processes import service
from rootward.core.requests import Law, Rule, Speculation, SpeculationMode
from rootward.errors import ConfigurationError
from rootward.rpc.clients import RemoteDrafter, RemoteVerifier
from rootward.testing.slow_link import Conditions, SlowLink

TABLE = "tabular:vocab=2048,seed=1,order=1,sharpness=3"
RTTS_MS = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0)
LONGEST_WAIT_MS = 5000.0
WARM_UP = 0.5  # of a measurement, so that what a verifier learns it learns before


@dataclass(frozen=True)
class System:
    """A way of decoding, and the flags of the verifier that serves it."""

    name: str
    speculation: Speculation
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """One system at one distance: tokens per second, tokens per round, share of rounds with a tree, bytes on the wire per round."""

    system: str
    rtt_ms: float
    rate: float
    tokens: float
    with_tree: float
    wire_bytes: float


def systems(ahead: int) -> tuple[System, ...]:
    grows = ("--num-ahead-tokens", str(ahead))
    traversal, match = (Rule.TRAVERSAL, Law.SAMPLED), (Rule.MATCH, Law.COUPLED)
    waits = ("--draft-wait-ms", str(LONGEST_WAIT_MS), "--num-ahead-tokens", "0")
    return (
        System("plain", Speculation(SpeculationMode.DISABLED)),
        System("waiting", Speculation(SpeculationMode.REQUIRED, *traversal), waits),
        System("traversal", Speculation(SpeculationMode.AUTO, *traversal), grows),
        System("coupled", Speculation(SpeculationMode.AUTO, *match), grows),
    )


@asynccontextmanager
async def running(system: System, given: argparse.Namespace) -> AsyncIterator[tuple[RemoteVerifier, SlowLink]]:
    """The system's own verifier and drafter, and the link between them."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        draft = f"{TABLE},noise={given.noise},noise_seed=2,step_ms={given.draft_ms}"
        address = await enter(service("drafter_service", "--model", draft))
        link = await enter(SlowLink(address))
        target = f"{TABLE},step_ms={given.verify_ms}"
        shape = ("--num-draft-tokens", str(given.nodes), "--max-num-seqs", str(given.sessions))
        flags = ("--model", target, "--drafters", link.address, *shape, *system.flags)
        verifier = await enter(RemoteVerifier(await enter(service("verifier_service", *flags))))
        async with asyncio.timeout(30), RemoteDrafter(address) as drafter:
            await drafter.get_info()
            while not (await verifier.get_info()).drafters:
                await asyncio.sleep(0.05)
        yield verifier, link


async def points(given: argparse.Namespace) -> list[Point]:
    """All systems at all distances, one system at a time, printed as they come."""
    found: list[Point] = []
    for system in systems(given.ahead):
        async with running(system, given) as (verifier, link):
            for rtt_ms in given.rtts:
                link.conditions = Conditions(rtt_ms / 2e3, given.jitter_ms / 1e3, given.loss)
                tokens = given.max_tokens // (3 if system.name == "plain" else 1)  # a token takes it a whole step
                load = Load(given.sessions, tokens, system.speculation, f"{system.name}-{rtt_ms:g}")
                await measured(verifier, load.scaled(WARM_UP))
                before = sum(link.num_bytes)
                run = await measured(verifier, load)
                rounds = max(run.rounds, 1)
                wire = (sum(link.num_bytes) - before) / rounds
                found.append(Point(system.name, rtt_ms, run.rate, run.block_efficiency, run.with_tree, wire))
                print(_line(found[-1]), flush=True)
    return found


def fit_of(found: Sequence[Point], verify_ms: float, system: str = "traversal") -> Fit:
    """The constants of the model, from the points at the smallest distance."""
    near = min(point.rtt_ms for point in found)
    at = {point.system: point for point in found if point.rtt_ms == near}
    return fitted(
        plain_rate=at["plain"].rate,
        verify_s=verify_ms / 1e3,
        waiting_rate=at["waiting"].rate,
        waiting_tokens=at["waiting"].tokens,
        living_rate=at[system].rate,
        tokens=at[system].tokens,
    )


def kept(found: Sequence[Point], rtt_ms: float) -> dict[str, float]:
    """What the claims are about: rates at this distance over those at zero, and over waiting for each tree."""
    rate = {(point.system, point.rtt_ms): point.rate for point in found}
    near = min(point.rtt_ms for point in found)
    ratios = {f"{name}_of_zero": rate[name, rtt_ms] / rate[name, near] for name in ("traversal", "coupled")}
    waits = {f"{name}_of_waiting": rate[name, rtt_ms] / rate["waiting", rtt_ms] for name in ("traversal", "coupled")}
    return {**ratios, **waits}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code. What is wrong is told in one line on stderr."""
    given = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        if not given.rtts or 0.0 not in given.rtts:
            raise ConfigurationError("--rtts: need 0 among them; everything is compared with zero distance")
        print("| system | round trip, ms | tokens/s | tokens per round | rounds with a tree | bytes per round |")
        print("|---|---|---|---|---|---|")
        found = asyncio.run(points(given))
    except ConfigurationError as wrong:
        print(str(wrong).splitlines()[0], file=sys.stderr)
        return wrong.exit_code
    fits = {name: fit_of(found, given.verify_ms, name) for name in ("waiting", "traversal", "coupled")}
    if given.out is not None:
        _write(given, found, fits)
    return 0


def _write(given: argparse.Namespace, found: list[Point], fits: dict[str, Fit]) -> None:
    from rootward.bench.distance_plot import draw
    from rootward.bench.environment import described

    given.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    claims = {f"{rtt:g}": kept(found, rtt) for rtt in given.rtts if rtt}
    report: dict[str, Any] = {**described(), "settings": settings, "kept": claims}
    report |= {"fit": {name: asdict(fit) for name, fit in fits.items()}, "points": [asdict(point) for point in found]}
    (given.out / "distance.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(found, fits, given, given.out / "distance.png")


def _line(point: Point) -> str:
    numbers = f"{point.rtt_ms:g} | {point.rate:.1f} | {point.tokens:.2f} | {point.with_tree:.2f}"
    return f"| {point.system} | {numbers} | {point.wire_bytes:.0f} |"


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
    parser.add_argument("--out", type=Path, help="folder of distance.json and distance.png (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
