"""`rootward keys`: API keys of a gateway."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer

from rootward.errors import ConfigurationError

keys = typer.Typer(name="keys", help="API keys of a gateway.", no_args_is_help=True)


@keys.callback()
def _group() -> None:
    """API keys of a gateway: hashed at rest, in a file that it reads again when it changes."""


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="Whom the key is for, as logs will say.")],
    tenant: Annotated[str, typer.Option(help="Whose quota it counts against.  [default: the name]")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="May also drain, watch and read metrics.")] = False,
    expires: Annotated[str, typer.Option(help="When it ends, such as 2027-01-01T00:00:00Z.  [default: never]")] = "",
) -> None:
    """Make a key: the entry for the gateway's file on stdout, the key itself, once, on stderr.

      rootward keys new mobile-app >> keys.yaml
      rootward serve gateway --api-keys keys.yaml …

    The first entry of a file needs the line "keys:" above it.
    """
    from rootward.keys import digest, new_key

    if expires and _moment(expires) is None:
        raise ConfigurationError(f"expires: {expires!r} is no moment; write one such as 2027-01-01T00:00:00Z")
    key = new_key()
    lines = [f"  - name: {json.dumps(name)}", f"    sha256: {digest(key)}"]
    lines += [f"    tenant: {json.dumps(tenant)}"] if tenant else []
    lines += [f"    scopes: [{'admin' if admin else 'generate'}]"]
    lines += [f"    expires: {expires}"] if expires else []
    typer.echo("\n".join(lines))
    typer.echo(f"key of {name}, shown once: {key}", err=True)


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
