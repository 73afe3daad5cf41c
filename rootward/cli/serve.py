"""`rootward serve …`: replaces this process by a service."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import typer

from rootward.errors import ConfigurationError

OWN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}  # parsed by the module
MARKS = {"gateway": "orjson", "worker": "torch"}  # a package that only this extra installs


@dataclass(frozen=True, slots=True)
class Service:
    """A module that can be run, the extras that it needs, and its line of help."""

    module: str
    extras: tuple[str, ...]
    help: str


SERVICES = {
    "all": Service(
        "gateway.local",
        ("gateway", "worker"),
        "Redis, drafter, verifier and gateway as processes on this machine; by default with the demo pair.",
    ),
    "gateway": Service(
        "gateway",
        ("gateway",),
        "The face to clients: gRPC and OpenAI-compatible HTTP, in front of one or more verifiers.",
    ),
    "verifier": Service(
        "verifier_service", ("worker",), "Runs the target model and decides on every token that is committed."
    ),
    "drafter": Service("drafter_service", ("worker",), "Grows token trees for verifiers with a small model."),
}

serve = typer.Typer(
    name="serve",
    no_args_is_help=True,
    help="Run a service, or all of them on this machine. Each shows its flags with --help.",
)


def command_of(role: str, flags: list[str]) -> list[str]:
    """The command line of a service. ConfigurationError when what it needs is not installed."""
    service = SERVICES[role]
    missing = [extra for extra in service.extras if find_spec(MARKS[extra]) is None]
    if missing:
        extras = ",".join(missing)
        raise ConfigurationError(f"serve {role}: needs more packages; run pip install 'rootward[{extras}]'")
    return [sys.executable, "-m", service.module, *flags]


def become(command: list[str]) -> None:
    """Run a command in place of this process, so that signals and exit code are its own."""
    sys.stdout.flush()
    os.execv(command[0], command)


def _add(role: str) -> None:
    @serve.command(role, help=SERVICES[role].help, context_settings=OWN_FLAGS)
    def run(ctx: typer.Context) -> None:
        become(command_of(role, ctx.args))


for _role in SERVICES:
    _add(_role)
