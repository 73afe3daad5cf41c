"""`rootward serve …`: replaces this process by a service."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import typer

from rootward.errors import ConfigurationError

MODULES = {
    "all": "gateway.local",
    "gateway": "gateway",
    "verifier": "verifier_service",
    "drafter": "drafter_service",
}
NEEDS = {"all": ("gateway", "worker"), "gateway": ("gateway",), "verifier": ("worker",), "drafter": ("worker",)}
MARKS = {"gateway": "orjson", "worker": "torch"}  # a package that only this extra brings

_OWN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

serve = typer.Typer(
    name="serve",
    no_args_is_help=True,
    help="Run a service, or all of them on this machine. Each shows its flags with --help.",
)


def command_of(role: str, flags: list[str]) -> list[str]:
    """The command line of a service. ConfigurationError when what it needs is not installed."""
    missing = [extra for extra in NEEDS[role] if find_spec(MARKS[extra]) is None]
    if missing:
        extras = ",".join(missing)
        raise ConfigurationError(f"serve {role}: needs more packages; run pip install 'rootward[{extras}]'")
    return [sys.executable, "-m", MODULES[role], *flags]


def _become(role: str, ctx: typer.Context) -> None:
    """The service takes over this process, so that signals and exit code are its own."""
    command = command_of(role, ctx.args)
    sys.stdout.flush()
    os.execv(command[0], command)


@serve.command("all", context_settings=_OWN_FLAGS)
def serve_all(ctx: typer.Context) -> None:
    """Redis, drafter, verifier and gateway as processes on this machine; by default with the demo pair."""
    _become("all", ctx)


@serve.command("gateway", context_settings=_OWN_FLAGS)
def serve_gateway(ctx: typer.Context) -> None:
    """The face to clients: gRPC and OpenAI-compatible HTTP, in front of one or more verifiers."""
    _become("gateway", ctx)


@serve.command("verifier", context_settings=_OWN_FLAGS)
def serve_verifier(ctx: typer.Context) -> None:
    """Runs the target model and owns every committed token."""
    _become("verifier", ctx)


@serve.command("drafter", context_settings=_OWN_FLAGS)
def serve_drafter(ctx: typer.Context) -> None:
    """Grows token trees for verifiers with a small model."""
    _become("drafter", ctx)
