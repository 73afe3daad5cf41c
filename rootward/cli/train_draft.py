"""`rootward train-draft`: replaces this process by the training of a draft head."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from rootward.cli.serve import become
from rootward.errors import ConfigurationError


def train_draft(ctx: typer.Context) -> None:
    """Train a draft head for TARGET, on text that it writes itself: `train-draft TARGET --out FOLDER`; --help lists the flags."""
    for package in ("torch", "transformers", "tqdm", "matplotlib"):
        if find_spec(package) is None:
            raise ConfigurationError(f"train-draft: {package} is missing; run pip install 'rootward[worker,training]'")
    if find_spec("training") is None:
        raise ConfigurationError(
            "train-draft: training is not part of the package; run it from a checkout of the repository"
        )
    become([sys.executable, "-m", "training.train_draft", *ctx.args])
