"""The forecast of `rootward plan` beside a longer measurement of services that are started anew.

    python -m benchmarks.plan_check --target FOLDER --draft FOLDER --plan plan.json               # makes the plan
    python -m benchmarks.plan_check --target FOLDER --draft FOLDER --plan plan.json --measure     # compares it with services
    python -m benchmarks.plan_check --report FOLDER                                               # the table of all results in a folder

`rootward serve all` runs the pair. As many sessions as the load send the prompts of the plan again and again through the gateway, without
speculation and with `auto`, in turns; counted are the tokens that arrive in a window of time. All that the services do is in the
measurement: prompts are read, and the controller learns, tries other sizes, and waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import described
from rootward import demo
from rootward.cli.serve import address_of, services_running, url_of
from rootward.client import AsyncClient
from rootward.plan.__main__ import prompts_of, service_flags
from rootward.plan.measurement import AUTO, LEARNING_ROUNDS, PLAIN, LoadGenerator

LOADS = (1, 4, 8)
GOAL = 0.15
MODES = {"plain": PLAIN, "auto": AUTO}
START_TIMEOUT_S = 300.0
FIRST_SEED = 1_000_000  # other texts than those of the plan at temperatures above 0


async def measured(given: argparse.Namespace, address: str, url: str) -> list[dict[str, float]]:
    """Tokens per second by temperature and load: of each mode the median of the repetitions, which take turns."""
    texts = demo.read_prompts(given.prompts) if given.prompts is not None else demo.chats()
    found = []
    prompts = prompts_of(url, texts, raw=given.raw)
    async with AsyncClient(address) as client:
        generator = LoadGenerator(client, prompts, max_tokens=given.tokens, first_seed=FIRST_SEED)
        for temperature in given.temperatures:
            await generator.write_answers(temperature, load=max(given.loads))
            for load in given.loads:
                here = {"load": load, "temperature": temperature}
                await generator.run(
                    **here, speculation=AUTO, seconds=given.warm_up, series=given.repetitions, rounds=LEARNING_ROUNDS
                )
                rates: dict[str, list[float]] = {name: [] for name in MODES}
                for repetition in range(given.repetitions):
                    for name, wish in MODES.items():
                        run = await generator.run(**here, speculation=wish, seconds=given.window, series=repetition)
                        rates[name].append(run.rate)
                shown = {name: [round(rate, 1) for rate in values] for name, values in rates.items()}
                print(temperature, load, shown, flush=True)
                found.append({**here, **{name: median(values) for name, values in rates.items()}})
    return found


def compared(plan: dict[str, Any], runs: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Forecast and measurement of every temperature and load, with the relative error of the forecast of speed and speed-up."""
    rows = []
    for run in runs:
        wanted = (run["temperature"], run["load"])
        one = next(f for f in plan["forecasts"] if (f["temperature"], f["load"]) == wanted and f["rtt_ms"] == 0)
        speedup = run["auto"] / run["plain"]
        rows.append(
            {
                "temperature": run["temperature"],
                "load": run["load"],
                "plain_forecast": one["plain_tokens_per_s"],
                "plain_measured": run["plain"],
                "auto_forecast": one["tokens_per_s"],
                "auto_measured": run["auto"],
                "speedup_forecast": one["speedup"],
                "speedup_measured": speedup,
                "speedup_error": one["speedup"] / speedup - 1.0,
                "speed_error": one["tokens_per_s"] / run["auto"] - 1.0,
            }
        )
    return rows


def as_markdown(reports: Sequence[dict[str, Any]]) -> str:
    """One table of all pairs. Errors beyond the goal are bold."""
    columns = (
        "pair",
        "T",
        "sessions",
        "plain: forecast, measured",
        "auto: forecast, measured",
        "speed-up: forecast, measured",
    )
    lines = [f"| {' | '.join((*columns, 'error of speed-up', 'error of tokens/s'))} |"]
    lines.append("|---|" + "---:|" * 7)
    errors: dict[str, list[float]] = {"speedup_error": [], "speed_error": []}
    for report in reports:
        for row in report["rows"]:
            cells = [f"{row[f'{name}_forecast']:.1f}, {row[f'{name}_measured']:.1f}" for name in ("plain", "auto")]
            cells.append(f"{row['speedup_forecast']:.2f}, {row['speedup_measured']:.2f}")
            for name, found in errors.items():
                value = row[name]
                cells.append(f"{value:+.0%}" if abs(value) <= GOAL else f"**{value:+.0%}**")
                found.append(abs(value))
            lines.append(f"| {report['name']} | {row['temperature']:g} | {row['load']} | {' | '.join(cells)} |")
    inside = {name: sum(error <= GOAL for error in found) for name, found in errors.items()}
    verdict = "; ".join(
        f"{inside[name]} of {len(found)} of {what}, median error {median(found):.0%}"
        for (name, found), what in zip(errors.items(), ("the speed-up", "tokens/s"), strict=True)
    )
    verdict = f"Forecasts within {GOAL:.0%}: {verdict}."
    return "\n".join([*lines, "", verdict])


def make_plan(given: argparse.Namespace) -> None:
    """`rootward plan` as a process of its own, into the file."""
    command = [sys.executable, "-m", "rootward.plan", given.target, given.draft, "--json"]
    command += ["--load", str(max(given.loads)), "--seconds", str(given.seconds), "--tokens", str(given.tokens)]
    command += ["--temperatures", *map(str, given.temperatures)]
    command += ["--prompts", str(given.prompts)] if given.prompts is not None else []
    command += ["--raw"] if given.raw else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    given.plan.write_text(json.dumps(json.loads(done.stdout), indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    if given.report is not None:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(given.report.glob("*.json"))]
        print(as_markdown(reports))
        return 0
    if not given.measure:
        make_plan(given)
        return 0
    plan = json.loads(given.plan.read_text(encoding="utf-8"))
    flags = service_flags(given.target, given.draft, sessions=max(given.loads), threads=plan["threads"])
    with services_running(flags, start_timeout_s=START_TIMEOUT_S) as lines:
        runs = asyncio.run(measured(given, address_of(lines), url_of(lines)))
    report = {"name": given.name, **described(), "rows": compared(plan, runs), "plan": plan}
    print(as_markdown([report]))
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    paths = demo.paths()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--name", default="demo pair", help="of the pair in the table")
    add("--target", default=str(paths.target), help="folder (default: the demo target)")
    add("--draft", default=str(paths.draft), help="draft model, head or ngram (default: the demo draft)")
    add("--prompts", type=Path, help="as of rootward plan")
    add("--raw", action="store_true", help="as of rootward plan")
    add("--plan", type=Path, default=Path("plan.json"), help="file of the plan (default plan.json)")
    add("--measure", action="store_true", help="measure, and compare with the plan")
    add("--out", type=Path, help="file of the comparison")
    add("--report", type=Path, help="folder with comparisons: print their table")
    add("--loads", type=int, nargs="+", default=LOADS)
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    add("--tokens", type=int, default=128, help="of an answer")
    add("--seconds", type=float, default=100.0, help="of measuring for the plan")
    add("--window", type=float, default=5.0, help="seconds of a measurement")
    add("--warm-up", type=float, default=5.0, help="seconds with auto before the measurements of a load")
    add("--repetitions", type=int, default=2)
    return parser


if __name__ == "__main__":
    sys.exit(main())
