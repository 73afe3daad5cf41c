"""`rootward bench rounds`: times of a round on running services, by sessions per drafter (inputs of drafter sizing).

One drafter and one verifier run as processes; the sessions generate at the same time, in a closed loop. From the counters of both:

    S   time of a round in draft forwards       A   row-seconds of wanted growth per round     W   time of a round queueing at the drafter
    Z   the rest of the round: R − S − W        D = N · A / (R − W): rows that would be busy if nothing queued

The same with two drafters at the largest two loads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results import command, markdown_table, save
from benchmarks.services import Load, Outcome, free_port, measured, scraped, service, verifier_with_drafters
from rootward import demo
from rootward.core.requests import Speculation, SpeculationMode
from rootward.wire.clients import RemoteVerifier

SESSIONS = (1, 2, 4, 8, 16)
TABLE = "tabular:vocab=2048,seed=1,order=1,sharpness=3"
WARM_UP = 0.3


@dataclass(frozen=True, slots=True)
class Point:
    """Means of a round in seconds. rate: tokens per second and session; tokens: per round."""

    drafters: int
    sessions: int
    round_s: float
    draft_s: float
    row_s: float
    stall_s: float
    rate: float
    tokens: float

    @property
    def rest_s(self) -> float:
        return max(0.0, self.round_s - self.draft_s - self.stall_s)

    @property
    def demand(self) -> float:
        """D = N·A/R0, in rows."""
        return self.sessions * self.row_s / (self.round_s - self.stall_s)


def point_of(drafters: int, sessions: int, run: Outcome, changes: dict[str, float]) -> Point:
    """Means of the counters of verifier and drafters while these sessions ran."""

    def mean(total: str, count: str) -> float:
        return changes.get(f"rootward_{total}", 0.0) / max(changes.get(f"rootward_{count}", 0.0), 1.0)

    growths = "draft_compute_seconds_count"
    return Point(
        drafters,
        sessions,
        round_s=mean("round_seconds_sum", "round_seconds_count"),
        draft_s=mean("draft_compute_seconds_sum", growths),
        row_s=mean("draft_row_seconds_total:wanted", growths),
        stall_s=mean("draft_stall_seconds_sum", "round_seconds_count"),
        rate=run.rate,
        tokens=run.block_efficiency,
    )


async def points(given: argparse.Namespace, drafters: int, sessions: Sequence[int]) -> list[Point]:
    """One point for each number of sessions, with so many drafters."""
    draft, target = models(given)
    found: list[Point] = []
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        admins = [f"127.0.0.1:{free_port()}" for _ in range(drafters + 1)]
        rows = ("--max-num-batched-tokens", str(given.rows), "--max-num-seqs", str(max(given.sessions)))
        device = ("--device", given.device)
        peers = [
            await enter(service("drafter_service", "--model", draft, "--admin-listen", admin, *rows, *device))
            for admin in admins[1:]
        ]
        max_seqs = max(sessions)
        flags = ["--model", target, "--drafters", ",".join(peers), "--admin-listen", admins[0]]
        flags += ["--num-draft-tokens", str(given.nodes), "--max-num-seqs", str(max_seqs)]
        flags += ["--max-num-batched-tokens", str(max_seqs * (given.nodes + 1) + 64), *device]
        verifier = await enter(verifier_with_drafters(await enter(service("verifier_service", *flags)), drafters))
        for number in sessions:
            found.append(await _point(verifier, admins, drafters, number, given.max_tokens))
    return found


async def _point(verifier: RemoteVerifier, admins: Sequence[str], drafters: int, sessions: int, tokens: int) -> Point:
    load = Load(sessions, tokens, Speculation(SpeculationMode.REQUIRED), f"{drafters}-{sessions}")
    await measured(verifier, load.scaled(WARM_UP))
    then = await _counted(admins)
    run = await measured(verifier, load)
    now = await _counted(admins)
    return point_of(drafters, sessions, run, {name: now[name] - then.get(name, 0.0) for name in now})


async def _counted(admins: Sequence[str]) -> dict[str, float]:
    """Metrics of all services, summed up."""
    found: dict[str, float] = {}
    for metrics in await asyncio.gather(*(asyncio.to_thread(scraped, admin) for admin in admins)):
        for name, value in metrics.items():
            found[name] = found.get(name, 0.0) + value
    return found


def models(given: argparse.Namespace) -> tuple[str, str]:
    """(draft, target) as the services take them."""
    if given.draft and given.target:
        return given.draft, given.target
    if given.pair == "demo":
        pair = demo.paths()
        return str(pair.draft), str(pair.target)
    return f"{TABLE},noise=0.6,noise_seed=2,step_ms={given.draft_ms}", f"{TABLE},step_ms={given.verify_ms}"


async def measured_points(given: argparse.Namespace) -> list[Point]:
    """One drafter at every number of sessions, two at twice the largest two."""
    one = await points(given, 1, sorted(given.sessions))
    return one + await points(given, 2, [2 * n for n in sorted(given.sessions)[-2:]])


@command
def main(argv: Sequence[str]) -> None:
    given = _parser().parse_args(argv)
    found = asyncio.run(measured_points(given))
    print(table(found))
    if given.out is not None:
        settings = {name: str(value) for name, value in vars(given).items() if name not in ("out", "draft", "target")}
        save(given.out / "rounds.json", {"settings": settings, "points": [asdict(point) for point in found]})
        (given.out / "rounds.md").write_text(table(found) + "\n", encoding="utf-8")


def table(found: Sequence[Point]) -> str:
    """Markdown; times in milliseconds."""
    names = ("drafters", "sessions", "tokens/s a session", "S, ms", "A, row-ms", "Z, ms", "R, ms", "W, ms", "D, rows")
    rows = []
    for p in found:
        times = (f"{1e3 * x:.1f}" for x in (p.draft_s, p.row_s, p.rest_s, p.round_s, p.stall_s))
        rows.append((p.drafters, p.sessions, f"{p.rate:.1f}", *times, f"{p.demand:.1f}"))
    return markdown_table(names, rows, num_text_columns=0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootward bench rounds",
        description="Times of a round on running services, by sessions per drafter.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--pair",
        choices=("tables", "demo"),
        default="tables",
        help="tables whose passes take a set time, or the demo pair",
    )
    parser.add_argument("--draft", help="with --target: your own models, as the services take them")
    parser.add_argument("--target", help="see --draft")
    parser.add_argument("--device", default="cpu", help="of both (default cpu)")
    parser.add_argument(
        "--sessions", type=int, nargs="+", default=SESSIONS, help="at once, of one drafter (default 1 2 4 8 16)"
    )
    parser.add_argument("--rows", type=int, default=32, help="of one draft forward (default 32)")
    parser.add_argument("--nodes", type=int, default=16, help="verified in a round (default 16)")
    parser.add_argument("--verify-ms", type=float, default=60.0, help="tables: a step of the target (default 60)")
    parser.add_argument("--draft-ms", type=float, default=4.0, help="tables: a level of the draft (default 4)")
    parser.add_argument("--max-tokens", type=int, default=120, help="tokens of a session (default 120)")
    parser.add_argument("--out", type=Path, help="folder of rounds.json and rounds.md (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
