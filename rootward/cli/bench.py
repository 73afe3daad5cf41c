"""`rootward bench …`: replaces this process by a benchmark."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import typer

from rootward.errors import ConfigurationError

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure. Each benchmark shows its flags with --help.",
)


_OWN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@bench.command("acceptance", context_settings=_OWN_FLAGS)
def acceptance(ctx: typer.Context) -> None:
    """Expected tokens per pass in closed form: rules × drafting × temperatures × tree sizes, for any pair of models."""
    _become("acceptance", ctx)


@bench.command("lookup", context_settings=_OWN_FLAGS)
def lookup(ctx: typer.Context) -> None:
    """Tokens per pass with drafters without a model (n-gram, recycling), replayed on the target's own texts."""
    _become("lookup", ctx)


@bench.command("distance", context_settings=_OWN_FLAGS)
def distance(ctx: typer.Context) -> None:
    """Tokens per second against the round-trip time between verifier and drafter: plain, waiting, living tree, coupled."""
    _become("distance", ctx)


@bench.command("rounds", context_settings=_OWN_FLAGS)
def rounds(ctx: typer.Context) -> None:
    """What a round costs on real services, by sessions per drafter: the worker model of the autoscaling simulation."""
    _become("rounds", ctx)


def _become(name: str, ctx: typer.Context) -> None:
    if find_spec("torch") is None:
        raise ConfigurationError(f"bench {name}: needs more packages; run pip install 'rootward[worker]'")
    if find_spec("benchmarks") is None:
        raise ConfigurationError(
            f"bench {name}: benchmarks are not part of the package; run it from a checkout of the repository"
        )
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{name}", *ctx.args])
