"""`rootward doctor`: checks this machine or a running system and advises changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rootward.cli.options import ApiKey, Output, OutputFormat
from rootward.cli.output import show
from rootward.doctor import Finding, Level, machine, system
from rootward.errors import ConfigurationError

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    gateway: Annotated[
        str, typer.Option(help="Gateway of a running system: host:port or grpcs://host:port.", show_default=False)
    ] = "",
    api_key: ApiKey = "",
    redis_url: Annotated[str, typer.Option(help="URL of the system's Redis.", show_default=False)] = "",
    tls_authority: Annotated[
        Path | None, typer.Option(help="PEM file of the authority that signs its certificates.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file of a client certificate for its workers.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the key of the client certificate.")] = None,
    output: Output = OutputFormat.text,
) -> None:
    """Check this machine (cores, threads, memory, processor, GPU, limits) and, with --gateway, a running system.

    Checks of a system: reachability, verifiers and drafters, their versions, distance of drafters, KV memory, Redis and its
    eviction policy, expiry of certificates, clocks. Exit code 3 if there is a problem, else 0, also with warnings.

    [bold]Examples[/bold]

      rootward doctor
      rootward doctor --gateway 127.0.0.1:50051 --redis-url redis://127.0.0.1:6379/0
    """
    if redis_url and not gateway:
        raise ConfigurationError("--redis-url: names the Redis of a system; give its --gateway too")
    files = {"--tls-authority": tls_authority, "--tls-certificate": tls_certificate, "--tls-key": tls_key}
    given = [flag for flag, file in files.items() if file is not None]
    if given and not gateway:
        raise ConfigurationError(f"{given[0]}: is for the certificates of a system; give its --gateway too")
    if given not in ([], ["--tls-authority"], list(files)):
        missing = " and ".join(flag for flag in files if flag not in given)
        raise ConfigurationError(
            f"{given[-1]}: is not used without {missing}; give all three files, or the authority alone"
        )
    found = machine.judge(machine.look())
    if gateway:
        seen = system.look(
            gateway,
            api_key=api_key,
            redis_url=redis_url,
            authority=tls_authority,
            certificate=tls_certificate,
            key=tls_key,
        )
        found += system.judge(asyncio.run(seen))
    problems = [one for one in found if one.level is Level.PROBLEM]
    show({"healthy": not problems, "findings": [asdict(one) for one in found]}, _table(found), output)
    if problems:
        raise ConfigurationError(f"{problems[0].name}: {problems[0].found}; {problems[0].advice}", exit_code=3)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "", "found", "what to change")
    for one in findings:
        level = Text(one.level.value, COLOURS[one.level.value])
        table.add_row(Text(one.name), level, Text(one.found), Text(one.advice))
    return table
