"""`rootward keys`: API keys of a gateway."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from rootward.errors import ConfigurationError
from rootward.keys import digest, new_key

keys = typer.Typer(name="keys", help="API keys of a gateway.", no_args_is_help=True)


@keys.callback()
def _group() -> None:
    """API keys of a gateway. It stores their hashes in a file, which it reloads when the file changes."""


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the key in logs.")],
    tenant: Annotated[str, typer.Option(help="Tenant whose quota applies.  [default: the name]")] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow draining, watching events and reading metrics.")
    ] = False,
    expires: Annotated[str, typer.Option(help="Expiry time, such as 2027-01-01T00:00:00Z.  [default: never]")] = "",
) -> None:
    """Create a key. Prints its entry for the key file on stdout, and on stderr the key itself, which is not stored.

      rootward keys new mobile-app >> keys.yaml
      rootward serve gateway --api-keys keys.yaml …

    A new file must begin with the line "keys:".
    """
    expiry = _parse_time(expires) if expires else None
    if expires and expiry is None:
        raise ConfigurationError(
            f"expires: {expires!r} is not a time with time zone; write one such as 2027-01-01T00:00:00Z"
        )
    if expiry is not None and expiry <= datetime.now(UTC):
        raise ConfigurationError(f"expires: {expires!r} is past; give a later time, or leave it out")
    if not name.strip():
        raise ConfigurationError(f"name: {name!r} is empty; give a name by which logs tell this key from others")
    key = new_key()
    lines = [f"  - name: {_quoted(name)}", f"    sha256: {digest(key)}"]
    lines += [f"    tenant: {_quoted(tenant)}"] if tenant else []
    lines += [f"    scopes: [{'admin' if admin else 'generate'}]"]
    lines += [f"    expires: {expires}"] if expires else []
    typer.echo("\n".join(lines))
    typer.echo(f"key of {name}, shown once: {key}", err=True)


def _quoted(text: str) -> str:
    """A string of YAML in ASCII. JSON's pair of surrogates for a character beyond U+FFFF would be two characters there."""
    escaped = (f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in text)
    return f'"{"".join(escaped)}"'


def _parse_time(text: str) -> datetime | None:
    """None unless `text` is an ISO 8601 time with a time zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else None
