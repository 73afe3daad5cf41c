"""Tool calls: what a model is asked for, and what it has written.

A call that the request forces (`tool_choice` "required" or a function's name) is a form of the output (`forced_schema`), so it is always
JSON of the function's parameters. With "auto" the model decides: its chat template says how it writes calls, and a `CallParser` finds
them in the text. Speculation knows nothing of either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from gateway.tokenizer import held_back
from rootward.errors import InvalidRequest

if TYPE_CHECKING:
    from gateway.schemas import FunctionTool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text, as OpenAI's clients expect it."""

    name: str
    arguments: str


class CallFormat(Enum):
    """How a model writes calls. The value is the text that they begin with; "": the output is calls if it is JSON."""

    HERMES = "<tool_call>"  # Hermes, Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    MISTRAL = "[TOOL_CALLS]"  # [TOOL_CALLS][{"name": …, "arguments": {…}}] or [TOOL_CALLS]name[ARGS]{…}
    JSON = ""  # Llama 3 and others: {"name": …, "parameters": {…}}, several in a list or with ";" between

    @classmethod
    def of_template(cls, template: str | None) -> CallFormat | None:
        """The one that a chat template tells the model of; None for a template without tools."""
        if not template or "tools" not in template:
            return None
        return next((one for one in (cls.HERMES, cls.MISTRAL) if one.value in template), cls.JSON)


def forced_schema(functions: Sequence[FunctionTool], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of one or more calls to any of these functions: a list of {"name": …, "arguments": …}."""
    definitions: dict[str, Any] = {}
    items = []
    for function in functions:
        parameters = dict(function.parameters) or {"type": "object"}
        for key in ("$defs", "definitions"):  # references begin at the root of the schema
            for name, definition in parameters.pop(key, {}).items():
                if definitions.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise InvalidRequest(
                        "tools", name, f"is defined twice in {key}, with different meanings; rename one"
                    )
        name = {"const": function.name}
        properties = {"name": name, "arguments": parameters}
        items.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": items}}
    return {**calls, **({} if parallel else {"maxItems": 1}), **definitions}


class CallParser:
    """Tells the calls of one text from the rest of it, as the text arrives."""

    def __init__(self, form: CallFormat, *, function: str = ""):
        """function: its name, where the whole text is its arguments."""
        self._form, self._function = form, function
        self._held = ""  # may be calls or the beginning of one
        self._calling = bool(function)
        self._begun = False  # there was text before

    def push(self, text: str) -> str:
        """The part of the text that is certainly none of a call."""
        self._held += text
        if self._calling:
            return ""
        if self._form is CallFormat.JSON:
            start = self._held.lstrip()
            if not self._begun and (not start or start[0] in "[{"):
                self._calling = bool(start)
                return ""
            num_free = len(self._held)
        else:
            at = self._held.find(self._form.value)
            self._calling = at >= 0
            num_free = at if self._calling else len(self._held) - held_back(self._held, [self._form.value])
        free, self._held = self._held[:num_free], self._held[num_free:]
        self._begun = self._begun or bool(free.strip())
        return free

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end of the text: more text, and the calls. Text that is cut or is no call is text."""
        held, self._held = self._held, ""
        if self._function:
            return "", [ToolCall(self._function, held)]
        calls = _parse(self._form, held) if self._calling else []
        return ("", calls) if calls else (held, [])


def _parse(form: CallFormat, text: str) -> list[ToolCall]:
    """The calls of a text that begins with one; [] if any of them cannot be read."""
    if form is CallFormat.HERMES:
        parts = [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    elif form is CallFormat.MISTRAL:
        parts = []
        for part in text.split("[TOOL_CALLS]")[1:]:
            named = re.match(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\](.*)", part, re.DOTALL)
            parts.append(part if named is None else f'{{"name": "{named[1]}", "arguments": {named[2]}}}')
    else:
        parts = [text]
    try:
        found = [value for part in parts for value in _values(part)]
        return [_call(value) for value in found]
    except (ValueError, RecursionError):
        return []


def _values(text: str) -> list[object]:
    """JSON values with blanks or ";" between; a list counts as its entries."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip("; \n\t")):
        at = len(text) - len(text[at:].lstrip("; \n\t"))
        value, at = decoder.raw_decode(text, at)
        values += value if isinstance(value, list) else [value]
    return values


def _call(value: object) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
