"""`rootward bench …`: replaces this process by a benchmark."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from rootward.cli.serve import OWN_FLAGS, become
from rootward.errors import ConfigurationError

BENCHMARKS = {
    "acceptance": "Expected tokens per pass in closed form: rules × drafting × temperatures × tree sizes, for any pair of models.",
    "lookup": "Tokens per pass with drafters without a model (n-gram, recycling), replayed on the target's own texts.",
    "distance": "Tokens per second against the round-trip time between verifier and drafter: plain, waiting, living tree, coupled.",
    "rounds": "The cost of a round on real services, by sessions per drafter: the worker model of the autoscaling simulation.",
}

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure. Each benchmark shows its flags with --help.",
)


def _add(name: str) -> None:
    @bench.command(name, help=BENCHMARKS[name], context_settings=OWN_FLAGS)
    def run(ctx: typer.Context) -> None:
        if find_spec("torch") is None:
            raise ConfigurationError(f"bench {name}: needs more packages; run pip install 'rootward[worker]'")
        if find_spec("benchmarks") is None:
            raise ConfigurationError(
                f"bench {name}: benchmarks are not part of the package; run it from a checkout of the repository"
            )
        become([sys.executable, "-m", f"benchmarks.{name}", *ctx.args])


for _name in BENCHMARKS:
    _add(_name)
