"""`rootward bench rounds`: what a round costs on real services, by sessions per drafter, and the worker model that follows.

One drafter and one verifier run as processes; so many sessions generate at once, in a closed loop. From what both counted meanwhile:

    S   time of a round in draft forwards       A   row-seconds of wanted growth a round       W   of a round, queueing at the drafter
    Z   the rest of the round: R − S − W        each by n, the sessions that the drafter holds

The fit: S(n) = S · (1 + crowd · (n − 1)); Z alone, and from two sessions on, which take turns at the verifier, again a line; A / S, the
width of trees, is what one session fills alone, or its share of the rows among those that draft at the same time. What it predicts, by the
simulation of the autoscaler with as many pods and sessions, stands beside what was measured, also for loads and a second drafter that the
fit has not seen (marked). D = N · A / (R − W): rows that would be busy if nobody queued.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.generations import Load, Outcome, measured
from benchmarks.processes import free_port, scraped, service
from benchmarks.rounds_fit import Fit, Point, fitted, predicted
from rootward import demo
from rootward.core.requests import Speculation, SpeculationMode
from rootward.errors import ConfigurationError
from rootward.wire.clients import RemoteVerifier

SESSIONS = (1, 2, 4, 8, 16)
HELD_OUT = (3, 5, 10)
TABLE = "tabular:vocab=2048,seed=1,order=1,sharpness=3"
WARM_UP = 0.3
MEASURED = "| drafters | sessions | tokens/s a session | S, ms | A, row-ms | Z, ms "
BESIDE = "| R, ms | predicted | W, ms | predicted | D, rows | predicted |"


def point_of(drafters: int, sessions: int, run: Outcome, changes: dict[str, float]) -> Point:
    """What verifier and drafters counted while these sessions ran."""

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
        spread=_spread(run.gaps_s),
    )


def _spread(gaps_s: Sequence[float]) -> float:
    """Standard deviation of the times between runs, over their mean."""
    return stdev(gaps_s) / fmean(gaps_s) if len(gaps_s) > 1 else 0.0


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
        places = max(sessions)
        flags = ["--model", target, "--drafters", ",".join(peers), "--admin-listen", admins[0]]
        flags += ["--num-draft-tokens", str(given.nodes), "--max-num-seqs", str(places)]
        flags += ["--max-num-batched-tokens", str(places * (given.nodes + 1) + 64), *device]
        verifier = await enter(RemoteVerifier(await enter(service("verifier_service", *flags))))
        async with asyncio.timeout(30):
            while len((await verifier.get_info()).drafters) < drafters:
                await asyncio.sleep(0.05)
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


async def measured_points(given: argparse.Namespace) -> tuple[list[Point], list[Point]]:
    """(for the fit: one drafter, by sessions; not for it: one drafter at other loads, two at the largest loads for each)."""
    one = await points(given, 1, sorted({*given.sessions, *given.held_out}))
    two = await points(given, 2, [2 * n for n in given.sessions[-2:]])
    return [p for p in one if p.sessions in given.sessions], [p for p in one if p.sessions not in given.sessions] + two


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code. What is wrong is told in one line on stderr."""
    given = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        seen, unseen = asyncio.run(measured_points(given))
    except ConfigurationError as wrong:
        print(str(wrong).splitlines()[0], file=sys.stderr)
        return wrong.exit_code
    fit = fitted(seen, given.rows)
    text = table(fit, seen, unseen)
    print(text)
    if given.out is not None:
        _write(given, fit, [*seen, *unseen], text)
    return 0


def table(fit: Fit, seen: Sequence[Point], unseen: Sequence[Point]) -> str:
    """Measured beside predicted, and how far predictions of what the fit has not seen are off."""
    lines = [MEASURED + BESIDE, "|---" * 12 + "|"]
    off: list[tuple[float, float]] = []
    for p in [*seen, *unseen]:
        outcome = predicted(fit, p.drafters, p.sessions)
        mark = ""
        if p in unseen:
            mark = " (not in the fit)"
            off.append((abs(outcome.round_s / p.round_s - 1), abs(outcome.demand / p.demand - 1)))
        parts = " | ".join(f"{1e3 * x:.1f}" for x in (p.draft_s, p.row_s, p.rest_s))
        rounds = f"{1e3 * p.round_s:.1f} | {1e3 * outcome.round_s:.1f} ({outcome.round_s / p.round_s:.2f})"
        stalls = f"{1e3 * p.stall_s:.1f} | {1e3 * outcome.stall_s:.1f}"
        demand = f"{p.demand:.1f} | {outcome.demand:.1f} ({outcome.demand / p.demand:.2f})"
        lines.append(f"| {p.drafters} | {p.sessions}{mark} | {p.rate:.1f} | {parts} | {rounds} | {stalls} | {demand} |")
    for name, errors in zip(("R", "D"), zip(*off, strict=True), strict=False):
        lines += [
            "",
            f"{name} of what the fit has not seen is off by {fmean(errors):.0%} on average, {max(errors):.0%} at most.",
        ]
    return "\n".join(lines)


def _write(given: argparse.Namespace, fit: Fit, found: Sequence[Point], text: str) -> None:
    from benchmarks.environment import described

    given.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    report = {**described(), "settings": settings, "fit": asdict(fit), "points": [asdict(p) for p in found]}
    name = "rounds-own" if given.draft and given.target else f"rounds-{given.pair}"
    (given.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (given.out / f"{name}.md").write_text(text + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootward bench rounds",
        description="What a round costs, by sessions per drafter, and the worker model of the simulation that follows.",
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
    parser.add_argument(
        "--held-out",
        type=int,
        nargs="*",
        default=HELD_OUT,
        help="of one drafter too, and not for the fit (default 3 5 10)",
    )
    parser.add_argument("--rows", type=int, default=32, help="of one draft forward (default 32)")
    parser.add_argument("--nodes", type=int, default=16, help="verified in a round (default 16)")
    parser.add_argument("--verify-ms", type=float, default=60.0, help="tables: a step of the target (default 60)")
    parser.add_argument("--draft-ms", type=float, default=4.0, help="tables: a level of the draft (default 4)")
    parser.add_argument("--max-tokens", type=int, default=120, help="tokens of a session (default 120)")
    parser.add_argument("--out", type=Path, help="folder of rounds-PAIR.json and .md (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
