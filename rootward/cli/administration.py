"""`rootward status`, `rootward abort` and `rootward drain`: look at a gateway, end its generations, and end it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rootward.cli.options import DEFAULT_URL, ApiKey, Output, OutputFormat, Url, open_client
from rootward.cli.output import show
from rootward.client.types import Load, ServerInfo
from rootward.errors import ConfigurationError, UnavailableError


def status(url: Url = DEFAULT_URL, api_key: ApiKey = "", output: Output = OutputFormat.text) -> None:
    """Show what a gateway serves: roles, readiness, load. Exit code 4 when it, or every verifier, is not there."""
    with open_client(url, api_key) as client:
        info = client.server_info()
        load = client.load()
    show({"server": asdict(info), "load": asdict(load)}, _table(url, info, load), output)
    if not any(worker.ready for worker in info.verifiers):
        raise UnavailableError("no verifier is ready", code="UNAVAILABLE")


def _table(url: str, info: ServerInfo, load: Load) -> Table:
    model = ", ".join(f"{m.name} (context {m.max_positions}, lossless: {m.lossless})" for m in info.models) or "-"
    title = Text(f"{url}: {model}", style="table.title")  # texts of others as `Text`: `[fd00::12]` is no markup
    table = Table("role", "name", "address", "state", title=title, title_justify="left")
    state = "draining" if load.draining else f"{load.num_running} running, {load.num_waiting} waiting"
    table.add_row("gateway", Text(info.worker), Text(url), state)
    for role, workers in (("verifier", info.verifiers), ("drafter", info.drafters)):
        for worker in workers:
            state = "draining" if worker.draining else "ready" if worker.ready else "not ready"
            table.add_row(role, Text(worker.name or "-"), Text(worker.address), state)
    for address in load.caught_drafters:
        table.add_row("drafter", "-", Text(address), "caught by the audit; verified by match")
    return table


def abort(
    request_ids: Annotated[list[str], typer.Argument(help="Request ids, chosen by clients or found in answers.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """End running generations; their clients get the part that has arrived. Prints the ids that were running. Exit code 2 if one was not.

    Requests of the key's own tenant; with an admin key, of any tenant.
    """
    with open_client(url, api_key) as client:
        found = client.abort(request_ids)
    for request_id in found:
        typer.echo(request_id)
    if missing := [request_id for request_id in request_ids if request_id not in found]:
        fix = "it has ended, is another tenant's, or the id is misspelt"
        raise ConfigurationError(f"request_ids: {', '.join(map(repr, missing))}: no such request runs; {fix}")


def drain(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    timeout_s: Annotated[
        float, typer.Option(min=0, help="Seconds until running requests are ended. (default: the gateway's setting)")
    ] = 0.0,
) -> None:
    """Have a gateway refuse new requests, let running ones end, and end itself. Prints how many are running, and does not wait.

    Needs an admin key where the gateway has keys. Requests that it ends continue at another gateway, if their clients know one.
    """
    with open_client(url, api_key) as client:
        typer.echo(f"{client.drain(timeout_s=timeout_s)} running")
