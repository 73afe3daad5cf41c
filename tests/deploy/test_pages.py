"""Examples in the pages for operators: the chart takes their values, and our command line their commands, as they stand."""

import re

import click
import pytest
import typer.main
import yaml
from support.helm import CHART, ROOT

from benchmarks import rounds, sizing
from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings
from rootward.cli.main import app
from verifier_service.settings import VerifierSettings

PAGES = sorted((ROOT / "docs" / "operations").glob("*.md"))
CHARTS = set(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def examples() -> dict[str, str]:
    """Every block of YAML that is made of the chart's values."""
    found = {}
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)):
            if set(yaml.safe_load(block)) <= CHARTS:
                found[f"{page.stem}-{number}"] = block
    return found


def test_there_are_examples():
    assert len(examples()) >= 4


@pytest.mark.parametrize("name", examples())
def test_an_example_is_taken(helm, name):
    done = helm.template(examples()[name])
    assert done.returncode == 0, done.stderr


def test_links_of_the_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_tests_that_the_pages_name_are_there():
    named = {path for page in PAGES for path in re.findall(r"`(tests/[\w/.]+)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


SETTINGS = {"gateway": GatewaySettings, "verifier": VerifierSettings, "drafter": DrafterSettings}
PARSERS = {"rounds": rounds._parser, "sizing": sizing.parser}
COMMAND = re.compile(r"(?:^|[`;] *)(rootward [a-z-]+|python -m benchmarks\.\w+)([^\n`#>;]*)", re.M)


def commands() -> list[tuple[str, list[str]]]:
    """(command, its words) of ours in all pages."""
    found = [match for page in PAGES for match in COMMAND.findall(page.read_text(encoding="utf-8"))]
    return [(command, [word for word in words.split() if word != "…"]) for command, words in found]


def test_there_are_commands():
    assert len(commands()) >= 8


@pytest.mark.parametrize(("command", "words"), commands(), ids=str)
def test_a_command_is_ours(command, words):
    """It is there, with the flags that the page gives it."""
    name = command.split()[-1].removeprefix("benchmarks.")
    verb, *rest = words or [""]
    if name == "serve":
        SETTINGS[verb].load([*rest, *missing(SETTINGS[verb], rest)])
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


def missing(settings, flags: list[str]) -> list[str]:
    """Required settings that a page leaves out behind its dots."""
    required = ["--" + name.replace("_", "-") for name, field in settings.model_fields.items() if field.is_required()]
    required += ["--model"] if settings is GatewaySettings else []  # or a list of models
    return [word for flag in required if flag not in flags for word in (flag, "127.0.0.1:1")]
