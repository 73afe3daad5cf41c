"""`rootward bench serve`: a running gateway under load. guidellm, a program of its own environment, sends the requests."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from http.client import HTTPException
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer
from rich.console import Group
from rich.markdown import Markdown

from rootward import demo
from rootward.cli.options import STATUS_TIMEOUT_S, ApiKey, NoSpeculation, Output, OutputFormat, Temperature
from rootward.cli.output import show
from rootward.errors import ConfigurationError
from rootward.guard import exit_on_sigterm

VERSION = "0.8"  # of guidellm, whose configuration and report differ from one minor version to the next
INSTALL = f"pipx install 'guidellm=={VERSION}.*'"
ROWS_PER_S = 1000  # of the data file: more requests than a gateway answers, because guidellm stops where its data ends
DEFAULT_STREAMS = "1,4,16"
MOST_STREAMS = 512  # of throughput, as guidellm has it in a sweep; a gateway runs and queues as many by default
END_S = 10.0  # for an interrupted guidellm to end its workers


class Profile(str, Enum):
    synchronous = "synchronous"
    concurrent = "concurrent"
    throughput = "throughput"
    constant = "constant"
    poisson = "poisson"
    sweep = "sweep"


@dataclass(frozen=True, slots=True)
class Spread:
    """Over the successful requests; None if there were none."""

    median: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """One load. `incomplete` requests ran when its time was over; they count in no figure but tokens per second."""

    load: str
    requests: int
    errors: int
    incomplete: int
    requests_per_s: float
    output_tokens_per_s: float
    first_token_ms: Spread
    inter_token_ms: Spread
    latency_s: Spread


def bench_serve(
    url: Annotated[str, typer.Option(help="HTTP address of the gateway.")] = "http://127.0.0.1:8000",
    profile: Annotated[
        Profile,
        typer.Option(
            help="Load, as guidellm names it: one request after another (synchronous), a fixed number of streams (concurrent), 512 streams "
            "(throughput), evenly (constant) or randomly (poisson) spaced arrivals, or ten steps from synchronous to throughput (sweep)."
        ),
    ] = Profile.concurrent,
    streams: Annotated[
        str,
        typer.Option(
            help=f"Streams of concurrent; 1,4,16 is three runs. (default: {DEFAULT_STREAMS})", show_default=False
        ),
    ] = "",
    rate: Annotated[
        str,
        typer.Option(help="Requests per second of constant and poisson; 0.5,1,2 is three runs.", show_default=False),
    ] = "",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each run.")] = 30.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    temperature: Temperature = None,
    no_speculation: NoSpeculation = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="One prompt a line, or JSON lines with `text`. (default: chat prompts of the demo)"),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send prompts without a chat template, to /v1/completions.")
    ] = False,
    model: Annotated[str, typer.Option(help="Name of a served model. (default: the gateway's first)")] = "",
    api_key: ApiKey = "",
    guidellm: Annotated[str, typer.Option(help="guidellm's program: a name on PATH, or a path.")] = "guidellm",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for guidellm's report, the table and a plot: report.json, table.md, plot.png."),
    ] = None,
    output: Output = OutputFormat.text,
) -> None:
    """Measure a running gateway under load: tokens per second, time to first token, inter-token latency, errors.

    guidellm 0.8 sends the requests. It is not a part of Rootward: pipx install 'guidellm==0.8.*'. Prompts repeat, so the gateway finds most
    of their KV in its cache; give more of them with --prompts where that matters.

    [bold]Examples[/bold]

      rootward bench serve
      rootward bench serve --profile poisson --rate 0.5,1,2 --seconds 60 --out results
      rootward bench serve --profile sweep --temperature 0 --no-speculation

    Exit code 4 when the gateway is not there, or no request succeeded.
    """
    program = _program(guidellm)
    if out is not None and find_spec("matplotlib") is None:
        raise ConfigurationError("--out: the plot needs matplotlib; run pip install matplotlib")
    texts = demo.chats() if prompts is None else demo.read_prompts(prompts)
    loads = _loads(profile, streams=streams, rate=rate)
    url = _http(url)
    names = _served(url, api_key)
    model = model or names[0]
    if model not in names:
        raise ConfigurationError(f"--model: {model!r} is not served here; use one of {', '.join(names)}")
    body = {"temperature": temperature, "speculation": "disabled" if no_speculation else None}
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": model,
        "request_format": "/v1/completions" if raw else "/v1/chat/completions",
        "max_tokens": max_tokens,
        "verify": True,
        "api_key": api_key or None,
        "extras": {"body": {name: value for name, value in body.items() if value is not None}},
    }
    report = _measured(program, backend, loads, texts=texts, profile=profile, seconds=seconds)
    points = read_report(report)
    table = _markdown(points)
    show([asdict(point) for point in points], Group(f"{model} at {url}", Markdown(table)), output)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report), encoding="utf-8")
        (out / "table.md").write_text(table, encoding="utf-8")
        _draw(points, out / "plot.png", f"{model}, {profile.value}")
    if not any(point.requests for point in points):
        raise ConfigurationError("bench serve: no request succeeded; see the gateway's log", exit_code=4)


def read_report(report: dict[str, Any]) -> list[Point]:
    """One point a run, in their order. ConfigurationError for a report of another form."""
    try:
        return [_point(one) for one in report["benchmarks"]]
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"guidellm: its report has no {error}; use guidellm {VERSION}: {INSTALL}") from None


def _point(run: dict[str, Any]) -> Point:
    metrics = run["metrics"]
    totals = metrics["request_totals"]

    def spread(name: str) -> Spread:
        values = metrics[name]["successful"]
        return Spread(values["median"], values["percentiles"]["p95"]) if totals["successful"] else Spread(None, None)

    return Point(
        load=_load(run["config"]["strategy"]),
        requests=totals["successful"],
        errors=totals["errored"],
        incomplete=totals["incomplete"],
        requests_per_s=metrics["requests_per_second"]["successful"]["mean"],
        output_tokens_per_s=metrics["output_tokens_per_second"]["total"]["mean"],
        first_token_ms=spread("time_to_first_token_ms"),
        inter_token_ms=spread("inter_token_latency_ms"),
        latency_s=spread("request_latency"),
    )


def _load(strategy: dict[str, Any]) -> str:
    kind = str(strategy["type_"])
    if kind == Profile.concurrent:
        return f"{strategy['streams']} stream{'s' * (strategy['streams'] > 1)}"
    return f"{strategy['rate']:.3g}/s" if "rate" in strategy else kind


def _program(name: str) -> str:
    """Path of guidellm. ConfigurationError if it is missing or has another version."""
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(f"--guidellm: no program {name!r}; run {INSTALL}, or give its path")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=120)
    version = (done.stdout.split() or ["?"])[-1]
    if version.split(".")[:2] != VERSION.split("."):
        raise ConfigurationError(f"--guidellm: {found} has version {version}, not {VERSION}; run {INSTALL}")
    return found


def _loads(profile: Profile, *, streams: str, rate: str) -> list[dict[str, Any]]:
    """Overrides of guidellm's profile, one for each run; empty for profiles without a load of their own."""
    flag = {Profile.concurrent: "--streams", Profile.constant: "--rate", Profile.poisson: "--rate"}.get(profile)
    for name, value in (("--streams", streams), ("--rate", rate)):
        if value and name != flag:
            raise ConfigurationError(f"{name}: has no meaning with --profile {profile.value}; leave it out")
    if flag == "--streams":
        return [{"profile.streams": number} for number in _numbers(flag, streams or DEFAULT_STREAMS, int)]
    if flag == "--rate":
        if not rate:
            raise ConfigurationError(f"--rate: --profile {profile.value} needs requests per second, such as 0.5,1,2")
        return [{"profile.rate": number} for number in _numbers(flag, rate, float)]
    return []


def _numbers(flag: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        found = [kind(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < value < math.inf for value in found):
        numbers = "whole numbers" if kind is int else "numbers"
        raise ConfigurationError(f"{flag}: {text!r}: use {numbers} above 0 with commas between")
    return found


def _http(url: str) -> str:
    """The address with its scheme and without a last slash."""
    full = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    if not full.startswith(("http://", "https://")):
        raise ConfigurationError(f"--url: {url!r}: the load goes over HTTP; give the gateway's --http-listen address")
    return full


def _served(url: str, api_key: str) -> list[str]:
    """Names of the models of the gateway. ConfigurationError if it does not answer."""
    request = Request(f"{url}/v1/models", headers={"authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urlopen(request, timeout=STATUS_TIMEOUT_S) as answer:
            return [one["id"] for one in json.load(answer)["data"]]
    except HTTPError as error:
        fix = "give an --api-key that it knows" if error.code in (401, 403) else "see 'rootward status'"
        code = 2 if error.code < 500 else 4
        raise ConfigurationError(f"--url: {url} answers {error.code} {error.reason}; {fix}", exit_code=code) from None
    except HTTPException:  # whose message is what was read, as of a gRPC port
        fix = "give the gateway's --http-listen address"
        raise ConfigurationError(f"--url: {url} does not answer in HTTP/1.1; {fix}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "start a server with 'rootward serve all', or name the HTTP address of a running one"
        raise ConfigurationError(f"--url: no gateway at {url} ({error}); {fix}", exit_code=4) from None


def _measured(
    program: str,
    backend: dict[str, Any],
    loads: Sequence[dict[str, Any]],
    *,
    texts: Sequence[str],
    profile: Profile,
    seconds: float,
) -> dict[str, Any]:
    """The report of guidellm. The API key goes into a file that only this user can read, not on the command line."""
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="rootward-bench-") as folder:
        data, report, config = (Path(folder, name) for name in ("prompts.jsonl", "report.json", "config.json"))
        rows = islice(cycle(texts), max(len(texts), math.ceil(ROWS_PER_S * seconds)))
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows), encoding="utf-8")
        limit = {"max_concurrency": MOST_STREAMS} if profile in (Profile.throughput, Profile.sweep) else {}
        spec = {
            "backend": backend,
            "profile": {"kind": profile.value, **limit},
            "constraints": [{"kind": "max_duration", "seconds": seconds}],
            "data": [{"kind": "json_file", "path": str(data), "load_kwargs": {"cache_dir": folder}}],
            "outputs": [{"kind": "json", "path": str(report)}],
            "metrics": {"kind": "generative", "sample_size": 0},  # figures alone, no texts
        }
        config.write_text(json.dumps({"spec": spec, "benchmarks": list(loads) or [None]}), encoding="utf-8")
        code = _exit_code([program, "run", "--config", str(config)])
        if code != 0 or not report.is_file():
            message = f"guidellm: ended with exit code {code}; its output above says why"
            raise ConfigurationError(message, exit_code=1)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def _exit_code(command: Sequence[str]) -> int:
    """Of a program that is interrupted with this one, and whose processes end with it: a killed guidellm leaves its workers behind."""
    with subprocess.Popen(command, stdout=2, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


COLUMNS = ("load", "requests", "errors", "req/s", "tokens/s", "TTFT, ms", "ITL, ms", "latency, s")
TIMES = "Output tokens per second; TTFT: time to first token, ITL: inter-token latency; median / 95th percentile."


def _cells(point: Point) -> tuple[str, ...]:
    def pair(spread: Spread, digits: int) -> str:
        return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in (spread.median, spread.p95))

    return (
        point.load,
        str(point.requests),
        str(point.errors),
        f"{point.requests_per_s:.2f}",
        f"{point.output_tokens_per_s:.1f}",
        pair(point.first_token_ms, 0),
        pair(point.inter_token_ms, 1),
        pair(point.latency_s, 2),
    )


def _markdown(points: Sequence[Point]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(point) for point in points)]
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{rows}\n{TIMES}\n"


def _draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Tokens per second, time to first token and inter-token latency over the requests answered per second."""
    from matplotlib.figure import Figure

    shown = sorted((point for point in points if point.requests), key=lambda point: point.requests_per_s)
    figure = Figure(figsize=(13, 4), layout="constrained")
    speed, first, between = figure.subplots(1, 3)
    rates = [point.requests_per_s for point in shown]
    speed.plot(rates, [point.output_tokens_per_s for point in shown], marker="o")
    for axes, field in ((first, "first_token_ms"), (between, "inter_token_ms")):
        spreads = [getattr(point, field) for point in shown]
        axes.plot(rates, [spread.median for spread in spreads], marker="o", label="median")
        axes.plot(rates, [spread.p95 for spread in spreads], marker="o", linestyle="--", label="95th percentile")
        axes.legend(fontsize="small")
    speed.set_ylabel("output tokens/s")
    first.set_ylabel("time to first token, ms")
    between.set_ylabel("inter-token latency, ms")
    for axes in (speed, first, between):
        axes.set_xlabel("requests answered per second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
