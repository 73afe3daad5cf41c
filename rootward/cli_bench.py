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


@bench.command(
    "acceptance",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def acceptance(ctx: typer.Context) -> None:
    """Expected tokens per pass in closed form: rules × drafting × temperatures × tree sizes, for any pair of models."""
    if find_spec("torch") is None:
        raise ConfigurationError("bench acceptance: needs more packages; run pip install 'rootward[worker]'")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rootward.bench.acceptance", *ctx.args])
