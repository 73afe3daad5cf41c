"""The forecast of `rootward plan` beside what services then do.

    python -m benchmarks.plan_check --target FOLDER --draft FOLDER --plan plan.json               # makes the plan
    python -m benchmarks.plan_check --target FOLDER --draft FOLDER --plan plan.json --measure     # compares it with services
    python -m benchmarks.plan_check --report FOLDER                                               # the table of all results in a folder

A verifier (and a drafter, where the draft is a model) run as processes. As many workers as the load send the prompts of the plan again and
again, without speculation and with `auto`, in turns; counted are the tokens that arrive in a window of time. Prompts are in the prefix
cache after the first turn. All else that the service does is in the measurement: the controller learns, tries other sizes, and waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import described
from benchmarks.services import service
from rootward import demo
from rootward.core.requests import Sampling, Speculation, SpeculationMode, Stopping, VerifierRequest
from rootward.engine.tokenizers import load_tokenizer
from rootward.wire.clients import RemoteVerifier
from verifier_service.plan.__main__ import LONGEST_PROMPT, is_head, prompt_ids

LOADS = (1, 4, 8)
GOAL = 0.15
MODES = {"plain": Speculation(SpeculationMode.DISABLED), "auto": Speculation()}


class Workers:
    """Sends prompts to a verifier from as many sessions as asked for, and counts the tokens of a window."""

    def __init__(self, verifier: RemoteVerifier, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._verifier, self._prompts, self._max_tokens = verifier, prompts, max_tokens
        self._numbers = count()

    async def rate(self, load: int, temperature: float, wish: Speculation, window_s: float) -> float:
        """Tokens per second of all sessions together. They all run from the beginning of the window to its end."""
        arrived: list[tuple[float, int]] = []
        workers = [asyncio.create_task(self._work(temperature, wish, arrived)) for _ in range(load)]
        while not arrived:
            await asyncio.sleep(0.005)
        await asyncio.sleep(window_s / 10)  # all of them have begun
        begun_s = time.perf_counter()
        await asyncio.sleep(window_s)
        ended_s = time.perf_counter()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await asyncio.sleep(0.2)  # the verifier frees what was cancelled
        tokens = sum(number for at_s, number in arrived if begun_s <= at_s < ended_s)
        return tokens / (ended_s - begun_s)

    async def _work(self, temperature: float, wish: Speculation, arrived: list[tuple[float, int]]) -> None:
        while True:
            number = next(self._numbers)
            request = VerifierRequest(
                f"check-{number}",
                tuple(self._prompts[number % len(self._prompts)]),
                Sampling(temperature),
                Stopping(self._max_tokens),
                wish,
                seed=number,
            )
            async for run in self._verifier.generate(request):
                arrived.append((time.perf_counter(), len(run.tokens)))


async def measured(given: argparse.Namespace, threads: int) -> list[dict[str, float]]:
    """Tokens per second by temperature and load: of each mode the median of the repetitions, which take turns."""
    texts = demo.read_prompts(given.prompts) if given.prompts is not None else demo.chats()
    prompts = prompt_ids(load_tokenizer(given.target), texts, raw=given.raw, longest=LONGEST_PROMPT)
    found = []
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        common = ["--num-threads", str(threads), "--max-num-seqs", str(max(given.loads)), "--log-level", "warning"]
        local, drafter = given.draft, ""
        if is_head(given.draft):
            local = f"head:{given.draft}"
        elif given.draft != "ngram":
            local = "none"
            drafter = await enter(service("drafter_service", "--model", given.draft, *common))
        flags = ["--model", given.target, "--local-draft", local, "--num-ahead-tokens", "0", *common]
        flags += ["--drafters", drafter] if drafter else []
        verifier = await enter(RemoteVerifier(await enter(service("verifier_service", *flags))))
        async with asyncio.timeout(60):
            while drafter and not (await verifier.get_info()).drafters:
                await asyncio.sleep(0.05)
        workers = Workers(verifier, prompts, given.tokens)
        for temperature in given.temperatures:
            for load in given.loads:
                await workers.rate(load, temperature, MODES["auto"], given.warm_up)
                rates: dict[str, list[float]] = {name: [] for name in MODES}
                for _ in range(given.repetitions):
                    for name, wish in MODES.items():
                        rates[name].append(await workers.rate(load, temperature, wish, given.window))
                print(
                    temperature,
                    load,
                    {name: [round(r, 1) for r in values] for name, values in rates.items()},
                    flush=True,
                )
                found.append({"temperature": temperature, "load": load, **{n: median(v) for n, v in rates.items()}})
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
    errors = []
    for report in reports:
        for row in report["rows"]:
            cells = [f"{row[f'{name}_forecast']:.1f}, {row[f'{name}_measured']:.1f}" for name in ("plain", "auto")]
            cells.append(f"{row['speedup_forecast']:.2f}, {row['speedup_measured']:.2f}")
            for name in ("speedup_error", "speed_error"):
                value = row[name]
                cells.append(f"{value:+.0%}" if abs(value) <= GOAL else f"**{value:+.0%}**")
            errors.append(abs(row["speedup_error"]))
            lines.append(f"| {report['name']} | {row['temperature']:g} | {row['load']} | {' | '.join(cells)} |")
    inside = sum(error <= GOAL for error in errors)
    return "\n".join(
        [
            *lines,
            "",
            f"{inside} of {len(errors)} forecasts of the speed-up within {GOAL:.0%}, median error {median(errors):.0%}.",
        ]
    )


def make_plan(given: argparse.Namespace) -> None:
    """`rootward plan` as a process of its own, into the file."""
    command = [sys.executable, "-m", "verifier_service.plan", given.target, given.draft, "--json"]
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
    runs = asyncio.run(measured(given, plan["threads"]))
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
    add("--seconds", type=float, default=80.0, help="of measuring for the plan")
    add("--window", type=float, default=5.0, help="seconds of a measurement")
    add("--warm-up", type=float, default=5.0, help="seconds with auto before the measurements of a load")
    add("--repetitions", type=int, default=2)
    return parser


if __name__ == "__main__":
    sys.exit(main())
