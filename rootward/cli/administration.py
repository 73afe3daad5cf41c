"""`rootward abort` and `rootward drain`: end generations, and end a gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from rootward.cli.options import DEFAULT_URL, ApiKey, Url, open_client


def abort(
    request_ids: Annotated[list[str], typer.Argument(help="Request ids, chosen by clients or found in answers.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """End running generations; their clients get the part that has arrived. Prints the ids that were running.

    Requests of the key's own tenant; with an admin key, of any tenant.
    """
    with open_client(url, api_key) as client:
        for request_id in client.abort(request_ids):
            typer.echo(request_id)


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
