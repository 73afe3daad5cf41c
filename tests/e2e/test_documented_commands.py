"""Commands of README and of the guides. Requests, programs and what looks at a gateway are run against the demo pair; of the others the
options are parsed by the program that they call. Those of README and quick start run in `test_documented_services.py` too."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise

import httpx
import pytest
import typer
from packaging.requirements import Requirement
from support.documented import ROOT, blocks, commands

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings, LocalSettings
from rootward.cli.main import app, main
from rootward.demo import paths
from verifier_service.settings import VerifierSettings

PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("quickstart", "choose-a-draft", "evaluate", "comparison", "how-it-works", "flags", "lossless")
    ),
)
INLINE = re.compile(r"`((?:rootward|make|pip install|python -m) [^`]+)`")
SETTINGS = {"all": LocalSettings, "gateway": GatewaySettings, "verifier": VerifierSettings, "drafter": DrafterSettings}
RUN = ("generate", "status", "top")  # subcommands that need a gateway and nothing else
ALONE = ("check-pair", "version")  # those that need no gateway
MODELS = {"TARGET": str(paths().target), "DRAFT": str(paths().draft)}  # of the reader


def is_run(words: list[str]) -> bool:
    return words[0] == "curl" or (words[0] == "rootward" and words[1] in (*RUN, *ALONE))


SCRIPTS = [
    pytest.param(words[: words.index(">")] if ">" in words else words, id=f"{page}: {' '.join(words)[:60]}")
    for page, text in blocks(PAGES, ("sh", "bash"))
    for words in commands(text)
]
RUN_HERE = [script for script in SCRIPTS if is_run(script.values[0])]
CHECKED = [script for script in SCRIPTS if script not in RUN_HERE]
MENTIONED = [
    pytest.param(shlex.split(found), id=f"{page}: {found[:60]}")
    for page in PAGES
    for found in dict.fromkeys(INLINE.findall((ROOT / page).read_text(encoding="utf-8")))
    if "…" not in found and "[" not in found.replace("'.[", "")
]
PROGRAMS = [pytest.param(text, id=f"{page}: {text.splitlines()[0]}") for page, text in blocks(PAGES, ("python",))]


@pytest.mark.parametrize("words", RUN_HERE)
def test_command_runs(words: list[str], stack, capsys: pytest.CaptureFixture[str]) -> None:
    if words[0] == "curl":
        request(words[1:], stack.gateway.http)
    else:
        given = [MODELS.get(word, word) for word in words[1:]]
        assert main([*given, *(["--url", stack.gateway.address] if words[1] in RUN else [])]) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("words", [*CHECKED, *MENTIONED])
def test_command_has_options_that_exist(words: list[str]) -> None:
    check_options(words)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str, stack, capsys: pytest.CaptureFixture[str]) -> None:
    for address, served in (("http://localhost:8000", stack.gateway.http), ("127.0.0.1:50051", stack.gateway.address)):
        program = program.replace(address, served)
    exec(compile(program, "documented", "exec"), {})
    assert capsys.readouterr().out.strip()


def request(words: list[str], url: str) -> None:
    """What curl sends. Of a stream, its events up to the last one."""
    (address,) = [word for word in words if word.startswith("localhost:8000/")]
    path = address.partition("/")[2]
    (body,) = [json.loads(after) for word, after in pairwise(words) if word == "-d"]
    answer = httpx.post(f"{url}/{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert any(json.loads(event)["choices"][0]["delta"].get("content") for event in events[:-1])
        return
    if body.get("speculation"):
        assert answer.json()["metrics"]["speculative_decoding"]["num_spec_steps"] >= 0


def check_options(words: list[str]) -> None:
    """Raises for a program, a subcommand or an option that does not exist."""
    if words[0] == "rootward":
        check_subcommand(words[1:])
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for wanted in words[2:]:
            requirement = Requirement(wanted.replace(".", project["name"], 1) if wanted.startswith(".") else wanted)
            assert requirement.name == project["name"]
            assert requirement.extras <= set(project["optional-dependencies"])
    elif words[0] == "make":
        goals = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[1] in goals
    elif words[:2] == ["python", "-m"]:
        flags = [word for word in words[3:] if word.startswith("--")]
        done = subprocess.run(
            [sys.executable, "-m", words[2], "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert [flag for flag in flags if flag not in done.stdout] == []
    elif words[0] == "helm":
        assert any((ROOT / word / "Chart.yaml").is_file() for word in words)
    elif "/bin/" not in words[0]:  # a program of an environment that the reader makes
        raise AssertionError(f"{words[0]}: no test knows how to check it")


def check_subcommand(words: list[str]) -> None:
    if words[:1] == ["serve"] and words[1:]:
        check_service(words[1], words[2:])
        return
    command = typer.main.get_command(app)
    context = command.make_context("rootward", list(words), resilient_parsing=words[0].startswith("--"))
    while hasattr(command, "commands") and not words[0].startswith("--"):
        name, command, words = command.resolve_command(context, list(words))
        context = command.make_context(name, list(words), parent=context)


def check_service(role: str, flags: list[str]) -> None:
    model = [] if role == "all" or "--model" in flags else ["--model", "x"]
    settings = SETTINGS[role].load([*flags, *model])
    for other in ("gateway", "verifier", "drafter") if role == "all" else ():
        check_service(other, shlex.split(getattr(settings, f"{other}_flags")))
