"""Reference pages of the site, read off the pydantic models, the settings of the services and the commands. Markdown."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, cast

import typer
from typer.cli import get_docs_for_click
from typer.core import MARKUP_MODE_KEY

from drafter_service.settings import DrafterSettings
from gateway import response_schemas, schemas
from gateway.app import build_app
from gateway.models import Models
from gateway.settings import GatewaySettings, LocalSettings
from rootward.cli.main import app as command_line_app
from rootward.cli.serve import SERVICES
from rootward.settings import PREFIX, ServiceSettings
from verifier_service.settings import VerifierSettings

Schema = Mapping[str, Any]

REQUESTS = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    response_schemas.ResponseRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
    "all": LocalSettings,
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxItems": "at most"}

HTTP_INTRODUCTION = """# HTTP API

Read off the pydantic models of the gateway; a running gateway serves the same as `/openapi.json`, and [this site too](../openapi.json).
What the parameters of a generation mean: [Parameters](../parameters.md). Unknown names are refused. An optional field may be `null`.
"""


@cache
def _description() -> Schema:
    routes_alone = cast(Models, ())
    description: Schema = build_app(routes_alone).openapi()
    return description


def openapi() -> str:
    """The description of the HTTP API."""
    return json.dumps(_description(), indent=1)


def http_api() -> str:
    """Endpoints, the fields of every request and of every answer."""
    endpoints = (
        (f"`{method.upper()} {path}`", _answer(operation), _text(operation))
        for path, operations in _description()["paths"].items()
        for method, operation in operations.items()
    )
    components = _description()["components"]["schemas"]
    requests = {model.__name__: path for model, path in zip(REQUESTS, PATHS, strict=True)}
    parts = [HTTP_INTRODUCTION, "## Endpoints", _table(("endpoint", "answer", ""), endpoints), "## Requests"]
    for name, path in requests.items():
        parts += [f"### `POST {path}` {{ #{name.lower()} }}", _fields(components[name])]
    parts += ["## Parts of requests and answers"]
    for name in sorted(set(components) - set(requests)):
        parts += [
            f"### {name} {{ #{name.lower()} }}",
            _text(components[name]),
            _fields(components[name]),
        ]
    return "\n\n".join(parts) + "\n"


def settings() -> str:
    """Every setting of every service."""
    parts = [
        "# Settings of the services",
        f"Field `max_num_seqs` is the flag `--max-num-seqs`, the variable `{PREFIX}MAX_NUM_SEQS` and the key `max_num_seqs` of the YAML "
        "file that `--config` names; the command line goes before the environment, the environment before the file.",
    ]
    for role, model in SETTINGS.items():
        properties = model.model_json_schema()
        rows = (
            (f"`--{name.replace('_', '-')}`", _type(field, properties), _default(field), _text(field))
            for name, field in properties["properties"].items()
        )
        parts += [
            f"## rootward serve {role}",
            SERVICES[role].help,
            _table(("flag", "type", "default", "meaning"), rows),
        ]
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Every command with its options, and how shells complete them."""
    command = typer.main.get_command(command_line_app)
    context = typer.Context(command, info_name="rootward", obj={MARKUP_MODE_KEY: "rich"})
    pages = get_docs_for_click(obj=command, ctx=context, indent=1, name="rootward", title="Commands")
    examples = re.compile(r"^ {2}(rootward .*)", re.MULTILINE)
    return COMPLETION + examples.sub(lambda found: f"    {html.unescape(found[1])}", pages) + "\n"


COMPLETION = """# Command line

**Completion.** `rootward --install-completion` installs it for the shell that runs it (bash, zsh, fish, PowerShell); the next shell has it.
`rootward --show-completion` prints the script instead, for a file of your own:

```sh
rootward --show-completion > ~/.local/share/bash-completion/completions/rootward
```

The flags of `rootward serve …` belong to the services: [Settings](settings.md), or `rootward serve gateway --help`.

"""


def _answer(operation: Schema) -> str:
    content = operation["responses"]["200"]["content"]
    kinds = [_type(kind["schema"]) for name, kind in content.items() if name == "application/json"]
    return ", ".join([*kinds, *("events" for name in content if name == "text/event-stream")])


def _fields(model: Schema) -> str:
    """Table of the fields of a model."""
    required = model.get("required", ())
    rows = (
        (f"`{name}`", _type(field), "required" if name in required else _default(field), _text(field))
        for name, field in model.get("properties", {}).items()
    )
    return _table(("field", "type", "default", ""), rows)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    head, body = tuple(columns), [tuple(row) for row in rows]
    if not any(row[-1] for row in body):  # nothing is said about any of them
        head, body = head[:-1], [row[:-1] for row in body]
    return "\n".join([line(head), line("---" for _ in head), *map(line, body)])


def _number(value: float) -> str:
    """A bound; large powers of two as such."""
    size = abs(int(value))
    if size >= 2**31 and size & (size - 1) == 0:
        return f"{'−' if value < 0 else ''}2^{size.bit_length() - 1}"
    return f"{value:g}"


def _text(of: Schema) -> str:
    """Its description, in which brackets are no links."""
    return of.get("description", "").replace("[", "\\[")


def _default(field: Schema) -> str:
    value = field.get("default")
    return "" if value is None or value in ("", [], {}) else f"`{json.dumps(value)}`"


def _type(field: Schema, of: Schema | None = None) -> str:
    """A JSON schema in a few words. of: where its references lead, if they are no parts of the page."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return _type(of["$defs"][name], of) if of else f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if options := field.get("anyOf"):
        return (
            " or ".join(dict.fromkeys(_type(option, of) for option in options if option.get("type") != "null"))
            or "null"
        )
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"list of {_type(field.get('items', {}), of)}"
    bounds = [f"{word} {_number(field[name])}" for name, word in BOUNDS.items() if name in field]
    return " ".join([kind, ", ".join(bounds)]).rstrip()
