"""`rootward plan`: replaces this process by the forecast of the verifier."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from rootward.cli.serve import become
from rootward.errors import ConfigurationError


def plan(ctx: typer.Context) -> None:
    """Will speculation pay? `plan TARGET DRAFT` measures a pair on this machine and forecasts its speed-up; --help lists the flags."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise ConfigurationError(f"plan: {package} is missing; run pip install 'rootward[worker]'")
    become([sys.executable, "-m", "verifier_service.plan", *ctx.args])
