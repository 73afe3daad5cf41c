"""The `rootward` command. Services are started by module name, never imported, so the base install needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rootward import errors
from rootward.cli.administration import abort, drain, status
from rootward.cli.chat import chat
from rootward.cli.check import check
from rootward.cli.check_pair import check_pair
from rootward.cli.doctor import doctor
from rootward.cli.download import download
from rootward.cli.generate import generate
from rootward.cli.keys import keys
from rootward.cli.serve import TOOLS, add_program, bench, serve
from rootward.cli.top import top

OK, INTERNAL, USAGE, INCOMPATIBLE, UNAVAILABLE = range(5)
INTERRUPTED = 130
AWAY = (
    errors.APIConnectionError,
    errors.UnavailableError,
    errors.DeadlineExceededError,
    errors.RateLimitError,
    errors.StreamInterruptedError,
)
MISTAKES = (
    errors.BadRequestError,
    errors.AuthenticationError,
    errors.PermissionDeniedError,
    errors.NotFoundError,
    errors.ConflictError,
    ValueError,
)

app = typer.Typer(
    name="rootward",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 internal error, 2 usage or configuration, 3 incompatible models, 4 unavailable.",
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda wanted: _print_version(wanted=wanted), help="Print the version."
        ),
    ] = False,
) -> None:
    """Lossless tree-speculative serving of large language models.

    A small draft model grows token trees; the target model checks a whole tree per pass.
    Several tokens per pass, distributed exactly as the target alone would write them.

    [bold]Try it[/bold] (no GPU, no downloads):

      rootward serve all
      rootward generate "def fib(n):" --stats
      rootward chat

    [bold]With your models[/bold], each in a terminal or on a machine of its own:

      rootward check-pair TARGET DRAFT
      rootward plan TARGET DRAFT
      rootward check TARGET DRAFT
      rootward serve drafter --model DRAFT
      rootward serve verifier --model TARGET --drafters 127.0.0.1:50061
      rootward serve gateway --model TARGET --verifiers 127.0.0.1:50052
    """


@app.command()
def version() -> None:
    """Print the version."""
    import rootward

    typer.echo(rootward.__version__)


app.add_typer(serve)
app.add_typer(bench)
app.add_typer(keys)
for _name, _program in TOOLS.items():
    add_program(app, _name, _program)
for _command in (generate, chat, check_pair, check, doctor, download, status, top, abort, drain):
    app.command()(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code. Mistakes of the user are one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(app(arguments, standalone_mode=False) or OK)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `rootward generate … | head`
        sys.stderr.close()
        return OK
    except Exception as error:
        if "--debug" in arguments:
            raise
        print(f"rootward: {_one_line(error)}", file=sys.stderr)
        return exit_code(error)


def exit_code(error: Exception) -> int:
    """Exit code of a command that failed with this error."""
    if isinstance(error, errors.ConfigurationError):
        return error.exit_code
    if isinstance(error, AWAY):
        return UNAVAILABLE
    return USAGE if isinstance(error, MISTAKES) or hasattr(error, "format_message") else INTERNAL


def _one_line(error: Exception) -> str:
    if hasattr(error, "format_message"):  # a wrong command line
        text = " ".join(str(error.format_message()).split()).rstrip(".") or "a command is missing"
        context = getattr(error, "ctx", None)  # its path begins with the name of the program
        names = context.command_path.removeprefix(context.find_root().command_path) if context else ""
        return f"{text}; see rootward{names} --help"
    if isinstance(error, errors.APIConnectionError) and not isinstance(error, errors.APITimeoutError):
        return f"url: {error}; start a server with 'rootward serve all', or name a running one with --url"
    text = " ".join(str(error).split())
    if isinstance(error, errors.AuthenticationError):
        return f"{text}; --api-key or ROOTWARD_API_KEY gives the key"
    if isinstance(error, errors.RootwardError | ValueError):
        return text
    return f"internal error ({type(error).__name__}: {text}); --debug shows where"
