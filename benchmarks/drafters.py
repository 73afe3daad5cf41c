"""`rootward bench drafters`: how many sessions one drafter serves, how fast, and how much of what it grows is of use.

One drafter and one verifier run as processes, with tables for models whose passes take a set time. So many sessions generate at once; what
the verifier counted meanwhile is read from its metrics:

    latency     commit until its first growth, mean; of it what the drafter took, and what the link took
    used        nodes verified over nodes that arrived: the rest came late or lay off the truth
    kept        share of commits whose root had been grown already, and has a tree waiting: the hit rate of growth ahead
    bytes       on the wire per round, both ways, all sessions together divided by their rounds

Without growth ahead, and with it: sampled trees get guesses for the bonus token, coupled ones are drawn larger than what is verified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.generations import Load, Outcome, measured
from benchmarks.processes import free_port, scraped, service
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode
from rootward.errors import ConfigurationError
from rootward.wire.clients import RemoteVerifier

TABLE = "tabular:vocab=2048,seed=1,order=1,sharpness=3"
SESSIONS = (1, 4, 8, 16, 32)
LAWS = {"sampled": (Rule.TRAVERSAL, DraftMode.SAMPLED), "coupled": (Rule.MATCH, DraftMode.COUPLED)}
WARM_UP = 0.3


@dataclass(frozen=True)
class Point:
    """One law, with or without growth ahead, at one number of sessions."""

    law: str
    ahead: int
    sessions: int
    rate: float  # tokens per second and session
    tokens: float  # per round
    latency_ms: float
    drafter_ms: float
    link_ms: float
    used: float
    kept: float
    wire_bytes: float


def point_of(
    law: str, ahead: int, run: Outcome, sessions: int, then: Mapping[str, float], now: Mapping[str, float]
) -> Point:
    """What changed in the verifier's metrics while these sessions ran."""

    def change(name: str) -> float:
        return now.get(f"rootward_{name}", 0.0) - then.get(f"rootward_{name}", 0.0)

    def mean_ms(name: str) -> float:
        return 1e3 * change(f"{name}_seconds_sum") / max(change(f"{name}_seconds_count"), 1.0)

    drafter_ms, link_ms = mean_ms("draft_wait"), mean_ms("draft_transport")
    arrived = change("draft_nodes_received_total") + change("draft_nodes_stale_total")
    kept, lost = (change(f"draft_commits_total:{root}") for root in ("grown", "new"))
    return Point(
        law,
        ahead,
        sessions,
        run.rate,
        run.block_efficiency,
        drafter_ms + link_ms,
        drafter_ms,
        link_ms,
        change("spec_decode_num_draft_tokens_total") / max(arrived, 1.0),
        kept / max(kept + lost, 1.0),
        change("draft_bytes_total") / max(run.rounds, 1),
    )


async def points(given: argparse.Namespace) -> list[Point]:
    """Every law without and with growth ahead, at every number of sessions, printed as they come."""
    found: list[Point] = []
    for law in LAWS:
        for ahead in sorted({0, given.ahead}):
            found += await _with(law, ahead, given)
    return found


async def _with(law: str, ahead: int, given: argparse.Namespace) -> list[Point]:
    found: list[Point] = []
    most = str(max(given.sessions))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        draft = f"{TABLE},noise={given.noise},noise_seed=2,step_ms={given.draft_ms}"
        rows = ("--max-num-batched-tokens", str(max(given.sessions) * (given.nodes + 1) + 64))
        address = await enter(service("drafter_service", "--model", draft, "--max-num-seqs", most))
        admin = f"127.0.0.1:{free_port()}"
        target = f"{TABLE},step_ms={given.verify_ms}"
        shape = ("--num-draft-tokens", str(given.nodes), "--num-ahead-tokens", str(ahead), "--max-num-seqs", most)
        flags = ("--model", target, "--drafters", address, "--admin-listen", admin, *shape, *rows)
        verifier = await enter(RemoteVerifier(await enter(service("verifier_service", *flags))))
        async with asyncio.timeout(30):
            while not (await verifier.get_info()).drafters:
                await asyncio.sleep(0.05)
        for sessions in given.sessions:
            wish = Speculation(SpeculationMode.REQUIRED, *LAWS[law])
            load = Load(sessions, given.max_tokens, wish, f"{law}-{sessions}")
            await measured(verifier, load.scaled(WARM_UP))
            then = await asyncio.to_thread(scraped, admin)
            run = await measured(verifier, load)
            found.append(point_of(law, ahead, run, sessions, then, await asyncio.to_thread(scraped, admin)))
            print(_line(found[-1]), flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code. What is wrong is told in one line on stderr."""
    given = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    print(
        "| law | ahead | sessions | tokens/s | tokens per round | latency, ms | drafter | link | used | kept | bytes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    try:
        found = asyncio.run(points(given))
    except ConfigurationError as wrong:
        print(str(wrong).splitlines()[0], file=sys.stderr)
        return wrong.exit_code
    if given.out is not None:
        _write(given, found)
    return 0


def _write(given: argparse.Namespace, found: Sequence[Point]) -> None:
    from benchmarks.drafters_plot import draw
    from benchmarks.environment import described

    given.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    report: dict[str, Any] = {**described(), "settings": settings, "points": [asdict(point) for point in found]}
    (given.out / "drafters.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(found, given.out / "drafters.png")


def _line(p: Point) -> str:
    times = f"{p.latency_ms:.1f} | {p.drafter_ms:.1f} | {p.link_ms:.1f}"
    shares = f"{p.used:.2f} | {p.kept:.2f} | {p.wire_bytes:.0f}"
    return f"| {p.law} | {p.ahead} | {p.sessions} | {p.rate:.1f} | {p.tokens:.2f} | {times} | {shares} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootward bench drafters",
        description="Sessions per drafter against latency, and how much of the growth is of use.",
        allow_abbrev=False,
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=SESSIONS, help="at once (default 1 4 8 16 32)")
    parser.add_argument("--ahead", type=int, default=24, help="nodes grown ahead of a round (default 24)")
    parser.add_argument("--nodes", type=int, default=16, help="nodes verified in a round (default 16)")
    parser.add_argument("--verify-ms", type=float, default=60.0, help="a step of the target (default 60)")
    parser.add_argument("--draft-ms", type=float, default=4.0, help="a level of the draft (default 4)")
    parser.add_argument("--noise", type=float, default=0.6, help="what sets the draft's logits apart (default 0.6)")
    parser.add_argument("--max-tokens", type=int, default=80, help="tokens of a session (default 80)")
    parser.add_argument("--out", type=Path, help="folder of drafters.json and drafters.png (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
