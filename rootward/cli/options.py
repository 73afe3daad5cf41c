"""Options that several subcommands share, and the client that short calls use."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from rootward.client import Client

DEFAULT_URL = "127.0.0.1:50051"
STATUS_TIMEOUT_S = 5.0  # of commands that do not generate


class OutputFormat(str, Enum):
    text = "text"
    json = "json"


Url = Annotated[str, typer.Option("--url", help="The gateway: host:port, grpc://host:port or grpcs://host:port.")]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key", envvar="ROOTWARD_API_KEY", help="API key, where the gateway has keys.", show_default=False
    ),
]
Output = Annotated[OutputFormat, typer.Option("--output", help="text, or json: one JSON object at the end.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 decodes greedily. (default: 1)")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens with this total probability.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the random numbers; makes the text repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string, not part of the text; may be given several times.")]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Decode plainly, for comparison.")]
Model = Annotated[str, typer.Option(help="Name of a served model. (default: the only one)")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the whole text.")]


def open_client(url: str, api_key: str) -> Client:
    """A client for calls that only ask or command a gateway: short timeout, no retries."""
    return Client(url, api_key=api_key or None, timeout=STATUS_TIMEOUT_S, max_retries=0)
