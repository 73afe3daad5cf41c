"""`rootward plan TARGET DRAFT`: starts services of both, measures, and says whether speculation pays."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request

from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from rootward import demo
from rootward.addresses import open_local, reserved_port
from rootward.cli.serve import address_of, require_names, services_running, url_of
from rootward.client import AsyncClient, Speculation
from rootward.errors import APIError, ConfigurationError
from rootward.host import available_cores
from rootward.plan.forecast import Forecast, forecasts
from rootward.plan.measurement import LoadGenerator, Measured, measure
from rootward.plan.report import answer, as_json, check_picture, draw, tables
from rootward.settings import ServiceSettings

LONGEST_PROMPT = 512  # tokens; of a longer prompt the end is read
LONGEST_TEXT = 8 * LONGEST_PROMPT  # characters that are sent of a text, for most more than `LONGEST_PROMPT` tokens
# In the gateway's refusals of texts and messages that the model cannot read whatever they say (`gateway.tokenizer`).
NOT_READ = (
    "this model has no tokenizer",
    "need a tokenizer, and this model has none",
    "need a chat template, and this model has none",
)
RTTS_MS = (0.0, 1.0, 5.0, 20.0, 50.0)
NGRAM = "ngram"
LEAST_SESSIONS = 16  # that services have room for


class Threads(ServiceSettings):
    """The setting of the services that decides how many threads a plan gives them, from the environment or the file that it names."""

    model_config = SettingsConfigDict(extra="ignore")  # that file has settings of services

    num_threads: int | None = Field(None, ge=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 with an answer, whichever it is; 2 for wrong options, 3 for models that do not fit. Errors are one line on stderr."""
    given = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        _check(given)
        measured = _measured(given)
        is_remote = not drafts_in_verifier(given.draft)
        found = forecasts(measured, rtts_ms=sorted({0.0, *RTTS_MS, given.rtt}) if is_remote else [0.0])
        _print(given, measured, found)
        if given.out is not None:
            draw(measured, found, given.out, _title(given))
    except (ConfigurationError, APIError) as error:
        print(f"rootward: {str(error).splitlines()[0]}", file=sys.stderr)
        return error.exit_code if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print(given: argparse.Namespace, measured: Sequence[Measured], found: Sequence[Forecast]) -> None:
    if given.json:
        about = {"target": _name(given.target), "draft": _name(given.draft), "threads": given.threads}
        print(json.dumps(as_json(measured, found, about=about), indent=1))
        return
    at_rtt = [one for one in found if one.rtt_ms == given.rtt]
    console = Console()
    console.print(f"[bold]{escape(_title(given))}[/bold], {given.threads} threads", *tables(measured, at_rtt), sep="\n")
    if not drafts_in_verifier(given.draft):
        temperature = given.temperatures[0]
        at_most_load = [one for one in found if (one.temperature, one.load) == (temperature, given.load)]
        by_distance = ", ".join(f"{one.rtt_ms:g} ms: {one.speedup:.2f}" for one in at_most_load)
        console.print(f"speed-up by distance at temperature {temperature:g}, {given.load} sessions: {by_distance}")
    console.print(f"\n[bold]{answer(at_rtt)}[/bold]")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="rootward plan",
        description="Will speculation pay? Starts services of the pair on this machine, measures them under load for about two minutes, "
        "and forecasts the speed-up by temperature, load and distance.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("target", metavar="TARGET", help="target model: folder, hub name, GGUF file, or demo: the shipped one")
    add("draft", metavar="DRAFT", help="draft model, demo, folder of a draft head, or ngram (looked up in the text)")
    add("--prompts", type=Path, help="one prompt a line, or JSON lines with `text` (default: chat prompts of the demo)")
    add("--raw", action="store_true", help="prompts as they are, without the chat template of the target")
    add(
        "--rtt",
        type=float,
        default=0.0,
        help="round trip between verifier and drafter in ms, for a draft model (default 0)",
    )
    add("--load", type=int, default=8, help="most sessions at once (default 8)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="default 0 1")
    add(
        "--nodes",
        type=int,
        default=16,
        help="most nodes of a round, as --num-draft-tokens of the verifier (default 16)",
    )
    add("--tokens", type=int, default=128, help="of each answer (default 128)")
    add(
        "--seconds",
        type=float,
        default=100.0,
        help="of measuring; start, loading and learning (128 rounds a load) not included",
    )
    add(
        "--threads",
        type=int,
        help="CPU threads of the target (default: ROOTWARD_NUM_THREADS, else all cores); a drafter has half as many, as in `serve all`",
    )
    add("--device", default="cpu", help="torch device (default cpu)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="default auto")
    add("--start-timeout-s", type=float, default=300.0, help="how long the services may take to start (default 300)")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="picture with the curves: a .png, .svg or .pdf file (needs matplotlib)")
    add("--json", action="store_true", help="everything as one JSON object")
    return made


def _measured(given: argparse.Namespace) -> list[Measured]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with reserved_port() as port, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        admin = f"127.0.0.1:{port}"
        flags = service_flags(
            given.target,
            given.draft,
            sessions=given.load,
            threads=given.threads,
            nodes=given.nodes,
            model_flags=["--device", given.device, "--dtype", given.dtype],
            admin=admin,
        )
        task = progress.add_task("starting services", total=1.0)
        with services_running(flags, start_timeout_s=given.start_timeout_s) as lines:
            progress.update(task, description="measuring")
            prompts = prompts_of(url_of(lines), given.texts, raw=given.raw)

            async def work() -> list[Measured]:
                async with AsyncClient(address_of(lines)) as client:
                    return await measure(
                        LoadGenerator(client, prompts, max_tokens=given.tokens, admin=admin, first_seed=given.seed),
                        temperatures=given.temperatures,
                        loads=sorted({1, (1 + given.load) // 2, given.load}),
                        most_nodes=given.nodes,
                        lookup=lookup_beside(given.draft),
                        drafter=NGRAM if given.draft == NGRAM else "",
                        seconds=given.seconds,
                        done=lambda share: progress.update(task, completed=share),
                    )

            return asyncio.run(work())


def service_flags(
    target: str,
    draft: str,
    *,
    sessions: int,
    threads: int | None = None,
    nodes: int | None = None,
    model_flags: Sequence[str] = (),
    admin: str = "",
) -> list[str]:
    """Flags of `rootward serve all` for a pair. admin: HTTP address of the verifier's metrics; model_flags: of verifier and drafter."""
    shared = [*model_flags, "--max-num-seqs", str(max(LEAST_SESSIONS, sessions))]
    verifier = [*shared, *(["--num-draft-tokens", str(nodes)] if nodes else [])]
    verifier += ["--admin-listen", admin] if admin else []
    verifier += ["--local-draft", f"head:{Path(draft).expanduser().resolve()}"] if is_head(draft) else []
    flags = ["--log-level", "error", "--model", target, "--draft-model", "none" if drafts_in_verifier(draft) else draft]
    flags += ["--num-threads", str(threads)] if threads else []
    return [*flags, f"--verifier-flags={shlex.join(verifier)}", f"--drafter-flags={shlex.join(shared)}"]


def lookup_beside(draft: str) -> Speculation | None:
    """What asks for drafts without this one, from the text alone; None for look-up itself."""
    return None if draft == NGRAM else Speculation(drafter=NGRAM)


def drafts_in_verifier(draft: str) -> bool:
    """Look-up and draft heads have no drafter, and no distance to one."""
    return draft == NGRAM or is_head(draft)


def is_head(draft: str) -> bool:
    """A folder with a draft head: a few layers that read hidden states of their target."""
    file = Path(draft).expanduser() / "config.json"
    if not file.is_file():
        return False
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"draft: {str(file)!r} is no JSON ({error})") from None
    names = " ".join(config.get("architectures") or ()).lower()
    return "eagle" in names or "dflash" in names or "draft_vocab_size" in config


def prompts_of(url: str, texts: Sequence[str], *, raw: bool) -> list[list[int]]:
    """Token ids of texts by a gateway (HTTP address): as first messages of conversations where the model has a chat template, unless they
    are `raw`, else as they are. Of longer ones the end. Made-up ids if the model has no tokenizer. ConfigurationError if a text is refused,
    or no token is left."""
    texts = [text[-LONGEST_TEXT:] for text in texts]
    chats = None if raw else _tokenized(url, [{"messages": [{"role": "user", "content": text}]} for text in texts])
    found = chats or _tokenized(url, [{"prompt": text, "add_special_tokens": False} for text in texts])
    if found is None:
        return [[1 + (7 * start + i) % 8 for i in range(8)] for start in range(16)]  # the model has no tokenizer
    kept = [ids[-LONGEST_PROMPT:] for ids in found if ids]
    if not kept:
        raise ConfigurationError("--prompts: none has a token; give text that the tokenizer knows")
    return kept


def _tokenized(url: str, bodies: Sequence[object]) -> list[list[int]] | None:
    """None if the gateway refuses, because the model has no tokenizer or no chat template. ConfigurationError for other refusals."""
    found = []
    for number, body in enumerate(bodies, 1):
        data = json.dumps(body).encode()
        try:
            with open_local(Request(f"{url}/tokenize", data, {"content-type": "application/json"})) as answer:
                found.append(list(map(int, json.load(answer)["tokens"])))
        except HTTPError as error:
            if error.code != HTTPStatus.BAD_REQUEST:
                raise
            reason = _reason(error)
            if any(words in reason for words in NOT_READ):
                return None
            raise ConfigurationError(
                f"--prompts: prompt {number} is refused ({reason}); change it or leave it out"
            ) from None
    return found


def _reason(error: HTTPError) -> str:
    """The gateway's message in its refusal."""
    content = error.read().decode(errors="replace")
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200]


def _title(given: argparse.Namespace) -> str:
    return f"{_name(given.target)} with {_name(given.draft)}"


def _name(spec: str) -> str:
    """A model's name without the folders above it."""
    return spec if ":" in spec else Path(spec).name or spec


def default_threads() -> int:
    """As many as services of this environment would use. ConfigurationError if the setting is wrong."""
    return Threads.load([]).num_threads or available_cores()


def _check(given: argparse.Namespace) -> None:
    """Fill in threads and texts; ConfigurationError names the option that is wrong."""
    require_names(target=given.target, draft=given.draft)
    given.texts = demo.read_prompts(given.prompts) if given.prompts is not None else demo.chats()
    local = "ngram" if given.draft == NGRAM else "a draft head" if is_head(given.draft) else ""
    if given.rtt and local:
        raise ConfigurationError(f"--rtt: {given.rtt}: {local} drafts in the verifier, at no distance; leave it out")
    if given.threads is None:
        given.threads = default_threads()
    if given.out is not None:
        check_picture(given.out)
    for name, ok, fix in (
        ("temperatures", all(0 <= t <= 100 for t in given.temperatures), "use numbers from 0 to 100"),
        ("load", 1 <= given.load <= 256, "use 1 to 256 sessions"),
        ("rtt", 0 <= given.rtt <= 10_000, "use milliseconds from 0 to 10000"),
        ("nodes", 1 <= given.nodes <= 240, "use 1 to 240 nodes"),
        ("tokens", given.tokens >= 8, "use at least 8"),
        ("seconds", given.seconds > 0, "use more than 0"),
        ("threads", given.threads >= 1, "use at least 1"),
    ):
        if not ok:
            raise ConfigurationError(f"--{name}: {getattr(given, name)}: {fix}")


if __name__ == "__main__":
    sys.exit(main())
