"""`rootward top`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rootward.cli.options import DEFAULT_URL, ApiKey, Output, OutputFormat, Url, open_client
from rootward.cli.output import key_values, show
from rootward.client.types import Load


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two readings.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table after two readings and exit; for scripts.")
    ] = False,
    output: Output = OutputFormat.text,
) -> None:
    """Watch a gateway work: requests, tokens per second, how much speculation gives, and each verifier. Ctrl-C ends it.

    [bold]requests/s[/bold] and [bold]tokens/s[/bold] are those that clients received in the last interval. [bold]tokens/round[/bold]
    is the block efficiency, 1 + accepted draft tokens per round: 1.00 is plain decoding. [bold]speedup[/bold] is the measured speed of
    trees over plain rounds of a verifier: below 1 it decodes plainly.

    [bold]Examples[/bold]

      rootward top
      rootward top --url grpcs://llm.example:443 --interval 10
      rootward top --once --output json

    Exit code 4 when the gateway is not there.
    """
    with open_client(url, api_key) as client:
        before = client.load()
        if once or output is OutputFormat.json:
            time.sleep(interval)
            now = client.load()
            show({**asdict(now), **rates(before, now)}, _view(url, before, now), output)
            return
        with Live(_view(url, before, before), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                now = client.load()
                live.update(_view(url, before, now), refresh=True)
                before = now


def rates(before: Load, now: Load) -> dict[str, float | None]:
    """Rates between two readings; since its start for a gateway that has restarted in between. None: nothing was measured."""
    if now.uptime_s < before.uptime_s:
        before = Load(0, 0, 0, False)
    seconds = now.uptime_s - before.uptime_s
    requests = now.num_requests - before.num_requests
    tokens = now.num_tokens - before.num_tokens
    rounds = now.num_rounds - before.num_rounds
    return {
        "requests_per_s": requests / seconds if seconds > 0 else None,
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        "tokens_per_round": tokens / rounds if rounds else None,
    }


def _view(url: str, before: Load, now: Load) -> RenderableType:
    known = rates(before, now)
    state = "draining" if now.draining else f"up {_ago(now.uptime_s)}"
    gateway = key_values(
        {
            "gateway": f"{url}, {state}",
            "requests": f"{now.num_running} of {now.max_sessions} running, {now.num_waiting} waiting",
            "requests/s": _number(known["requests_per_s"]),
            "tokens/s": _number(known["tokens_per_s"]),
            "tokens/round": _number(known["tokens_per_round"], 2),
        }
    )
    table = Table("verifier", "state", "running", "waiting", "slots", "speedup")
    for one in now.verifiers:
        counts = map(str, (one.num_running, one.num_waiting, one.max_sessions))
        table.add_row(Text(one.name), "ready" if one.ready else "not ready", *counts, _number(one.speedup, 2))
    return Group(gateway, table)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ago(seconds: float) -> str:
    minutes = int(seconds // 60) % 60
    hours = int(seconds // 3600)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
