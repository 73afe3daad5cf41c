"""Subcommands that are programs of their own, with flags of their own: services, benchmarks, plan, training. Each replaces this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import typer
from typer.core import TyperCommand

from rootward.cli.bench_serve import bench_serve
from rootward.errors import ConfigurationError
from rootward.guard import Guard, exit_on_sigterm
from rootward.host import environment_with_packages, environment_without

OWN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}  # parsed by the module
READY = " all listening on "  # in the line that `serve all` prints when all services are ready
STOP_TIMEOUT_S = 30.0
CHECKOUT = Path(__file__).parents[2]  # if this is one
OF_CALLERS = ("ROOTWARD_API_KEYS", "ROOTWARD_PUBLIC_TLS_", "ROOTWARD_TLS_")  # variables: who may call services
OF_STORES = ("ROOTWARD_REDIS_URL",)  # where services find each other, and keep sessions
PACKAGE_OF_EXTRA = {
    "gateway": "orjson",
    "worker": "torch",
    "training": "matplotlib",
}  # the extra is installed if this package is


@dataclass(frozen=True, slots=True)
class Program:
    """A module that can be run, the extras that it needs, its help, and where its argparse parser comes from, as module:attributes."""

    module: str
    extras: tuple[str, ...]
    help: str
    parser: str = ""


SERVICES = {
    "all": Program(
        "gateway.local",
        ("gateway", "worker"),
        "Redis, drafter, verifier and gateway as processes on this machine; by default with SmolLM2, if `make demo` has fetched it, or the "
        "shipped pair.",
        parser="gateway.settings:LocalSettings.parser",
    ),
    "gateway": Program(
        "gateway",
        ("gateway",),
        "Serves clients over gRPC and OpenAI-compatible HTTP, in front of one or more verifiers.",
        parser="gateway.settings:GatewaySettings.parser",
    ),
    "verifier": Program(
        "verifier_service",
        ("worker",),
        "Runs the target model and verifies token trees.",
        parser="verifier_service.settings:VerifierSettings.parser",
    ),
    "drafter": Program(
        "drafter_service",
        ("worker",),
        "Grows token trees for verifiers with a small model.",
        parser="drafter_service.settings:DrafterSettings.parser",
    ),
}
BENCHMARKS = {
    "acceptance": "Expected tokens per pass in closed form: rules × drafting × temperatures × tree sizes, for any pair of models.",
    "lookup": "Tokens per pass with drafters without a model (n-gram, recycling), replayed on the target's own texts.",
    "distance": "Tokens per second against the round-trip time between verifier and drafter: plain, waiting, living tree, coupled.",
    "rounds": "The cost of a round on real services, by sessions per drafter: the worker model of the autoscaling simulation.",
}
TOOLS = {
    "train-draft": Program(
        "training.train_draft",
        ("worker", "training"),
        "Train a draft head for TARGET, on text that it writes itself: `train-draft TARGET --out FOLDER`; --help lists the flags.",
    ),
    "plan": Program(
        "rootward.plan",
        ("gateway", "worker"),
        "Will speculation pay? `plan TARGET DRAFT` measures a pair on this machine and forecasts its speed-up; --help lists the flags.",
        parser="rootward.plan.__main__:parser",
    ),
}

serve = typer.Typer(
    name="serve",
    no_args_is_help=True,
    help="Run a service, or all services on this machine. `--help` after the service lists its flags.",
)
bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Run a benchmark. `--help` after its name lists its flags.",
)


def command_of(role: str, flags: list[str]) -> list[str]:
    """The command line of a service. ConfigurationError when what it needs is not installed."""
    return _command(f"serve {role}", SERVICES[role], flags)


def require_names(**models: str) -> None:
    """ConfigurationError for a model that is "", with which `serve all` takes its default."""
    for role, spec in models.items():
        if not spec.strip():
            raise ConfigurationError(f"{role}: {spec!r} names no model; give a folder, hub name, GGUF file or demo")


@contextmanager
def services_running(
    flags: Sequence[str], *, start_timeout_s: float, stderr: IO[Any] | None = None
) -> Iterator[list[str]]:
    """Runs `serve all` on free ports of this machine until the end of the block, without API keys, certificates and the Redis of the
    environment. Returns the lines that it printed up to its address.

    ConfigurationError with the exit code of the process if it does not start. SIGTERM leaves the block by SystemExit.
    """
    own = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--log-level", "warning"]
    command = command_of("all", [*own, "--start-timeout-s", str(start_timeout_s), *flags])
    with exit_on_sigterm(), Guard() as guard:
        environment = environment_without(OF_CALLERS + OF_STORES)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True)
        guard.started(process.pid)
        try:
            lines: list[str] = []
            while not lines or READY not in lines[-1]:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise ConfigurationError("serve all: the services do not start; see their log", process.wait() or 1)
                lines.append(line.strip())
            yield lines
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            guard.ended(process.pid)


def address_of(lines: Sequence[str]) -> str:
    """The gRPC address of the gateway in what `services_running` returns."""
    return lines[-1].partition(READY)[2].split()[0]


def url_of(lines: Sequence[str]) -> str:
    """The HTTP address of the gateway, as `address_of`."""
    return lines[-1].split()[-1]


def _command(name: str, program: Program, flags: list[str]) -> list[str]:
    missing = [extra for extra in program.extras if find_spec(PACKAGE_OF_EXTRA[extra]) is None]
    if missing:
        raise ConfigurationError(f"{name}: needs more packages; run pip install 'rootward[{','.join(missing)}]'")
    package = _package(program)
    if find_spec(package) is None and not (CHECKOUT / package / "__init__.py").is_file():
        raise ConfigurationError(
            f"{name}: {package} is not part of the package; install Rootward from a checkout of the repository by `pip install -e`"
        )
    return [sys.executable, "-m", program.module, *flags]


def _package(program: Program) -> str:
    return program.module.partition(".")[0]


def add_program(app: typer.Typer, name: str, program: Program, *, shown_as: str = "") -> None:
    """A subcommand that replaces this process by the program, which so receives signals and sets the exit code."""

    class ProgramCommand(TyperCommand):
        def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
            """The flags of the program, which parses them itself. typer's class of completions moves between modules."""
            flags = [flag for flag in _flags(program) if flag.startswith(incomplete)]
            return [SimpleNamespace(value=flag, type="plain", help=None) for flag in flags]

    def run(ctx: typer.Context) -> None:
        command = _command(shown_as or name, program, ctx.args)
        sys.stdout.flush()
        if find_spec(_package(program)) is not None:
            os.execv(command[0], command)
        # An editable installation leads to the packages of the wheel alone, not to `benchmarks` and `training`.
        os.execve(command[0], command, environment_with_packages(CHECKOUT))

    app.command(name, cls=ProgramCommand, help=program.help, context_settings=OWN_FLAGS)(run)


def _flags(program: Program) -> list[str]:
    """Flags of the program's parser; none if it has no parser or needs packages that are not installed."""
    module, _, attributes = program.parser.partition(":")
    if not module or any(find_spec(PACKAGE_OF_EXTRA[extra]) is None for extra in program.extras):
        return []
    actions = attrgetter(attributes)(import_module(module))()._actions
    return [flag for action in actions for flag in action.option_strings if flag.startswith("--")]


for _role, _program in SERVICES.items():
    add_program(serve, _role, _program, shown_as=f"serve {_role}")
for _name, _help in BENCHMARKS.items():
    _benchmark = Program(f"benchmarks.{_name}", ("worker",), _help)
    add_program(bench, _name, _benchmark, shown_as=f"bench {_name}")
bench.command("serve")(bench_serve)
