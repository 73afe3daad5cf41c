"""The pages for operators: their links and the tests they name are there, and our command line takes their commands as they stand."""

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

from benchmarks import rounds, sizing
from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings, LocalSettings
from rootward.cli.main import app
from verifier_service.settings import VerifierSettings

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "operations").glob("*.md"))


def test_links_of_the_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_tests_that_the_pages_name_are_there():
    named = {path for page in PAGES for path in re.findall(r"`(tests/[\w/.]+)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


SETTINGS = {"all": LocalSettings, "gateway": GatewaySettings, "verifier": VerifierSettings, "drafter": DrafterSettings}
PARSERS = {"rounds": rounds._parser, "sizing": sizing.parser}
COMMAND = re.compile(r"(?:^|[`;] *)(rootward [a-z-]+|python -m benchmarks\.\w+)([^\n`#>;]*)", re.M)


def commands() -> list[tuple[str, list[str]]]:
    """(command, its words) of ours in all pages."""
    found = [match for page in PAGES for match in COMMAND.findall(page.read_text(encoding="utf-8"))]
    return [(command, [word for word in shlex.split(words) if word != "…"]) for command, words in found]


def test_there_are_commands():
    assert len(commands()) >= 8


@pytest.mark.parametrize(("command", "words"), commands(), ids=str)
def test_a_command_is_ours(command, words):
    """It is there, with the flags that the page gives it."""
    name = command.split()[-1].removeprefix("benchmarks.")
    verb, *rest = words or [""]
    if name == "serve":
        settings = load(SETTINGS[verb], rest)
        for service in ("gateway", "verifier", "drafter") if verb == "all" else ():
            load(SETTINGS[service], shlex.split(getattr(settings, f"{service}_flags")))
    elif name == "dishonest":  # a drafter with one flag more
        assert words[0] == "--cheat"
        DrafterSettings.load(words[2:])
    elif name in PARSERS or (name == "bench" and verb in PARSERS):
        PARSERS[verb if name == "bench" else name]().parse_args(rest if name == "bench" else words)
    else:
        group = typer.main.get_command(app).commands[name]
        leaf = group.commands[verb] if isinstance(group, click.Group) or hasattr(group, "commands") else group
        known = {option for parameter in leaf.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def load(settings, flags: list[str]):
    return settings.load([*flags, *missing(settings, flags)])


def missing(settings, flags: list[str]) -> list[str]:
    """Required settings that a page leaves out behind its dots."""
    required = ["--" + name.replace("_", "-") for name, field in settings.model_fields.items() if field.is_required()]
    required += ["--model"] if settings is GatewaySettings else []  # or a list of models
    return [word for flag in required if flag not in flags for word in (flag, "127.0.0.1:1")]
