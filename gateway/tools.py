"""Tool calls: forms of the output that have calls, and the parser of calls in a text.

A call that the request forces (`tool_choice` "required" or a function's name) is a form of the output (`forced_schema`), so it is always
JSON of the function's parameters. With "auto" the model decides: its chat template shows how it writes calls (`call_format_of`), and a
`CallParser` finds them in the text. If such calls must be valid (`strict`), or the rest of the output has a form, a grammar applies from
the place at which the model begins a call (`grammar_of_choice`). Speculation is independent of all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import regex

from gateway.detokenizer import held_back
from gateway.requests import Chat
from gateway.tokenizer import Tokenizer
from rootward.core.requests import is_text
from rootward.errors import InvalidRequest, UnsupportedParameter

if TYPE_CHECKING:
    from gateway.schemas import FunctionTool


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call. Only the first piece has a `name`. `arguments` is a piece of JSON text."""

    index: int  # of the call
    name: str
    arguments: str


class CallFormat(Enum):
    """How a model writes calls. The value is the mark that they begin with; "": the output is calls if it is JSON."""

    HERMES = "<tool_call>"  # Hermes, Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    MISTRAL = "[TOOL_CALLS]"  # [TOOL_CALLS][{"name": …, "arguments": {…}}] or [TOOL_CALLS]name[ARGS]{…}
    JSON = ""  # Llama 3 and others: {"name": …, "parameters": {…}}, several in a list or with ";" between


class Tools(Enum):
    """Why the chat template of a model shows no `CallFormat`."""

    NONE = "are not in this model's chat template"
    UNKNOWN = "are called in a format of this model that is not known here"


# Rendered by a template to see its format. Nine letters and digits are an id that the templates of all models accept.
_PROBE = {"name": "probe_function", "description": "d", "parameters": {"type": "object", "properties": {}}}
_CALLED = {"id": "probe0001", "type": "function", "function": {"name": "probe_function", "arguments": {"a": "b"}}}
_SHOWN = {
    CallFormat.HERMES: regex.compile(r'\s*<tool_call>\s*[\[{]\s*[{"]'),
    CallFormat.MISTRAL: regex.compile(r"\s*\[TOOL_CALLS\]\s*(?:\[\s*\{|probe_function.*\[ARGS\])", regex.DOTALL),
    CallFormat.JSON: regex.compile(r'\s*\[?\s*\{\s*"(?:type|id|name)"'),
}


@lru_cache(64)
def call_format_of(tokenizer: Tokenizer) -> CallFormat | Tools:
    """The format in which the tokenizer's chat template writes the calls of an earlier answer."""
    user, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "probe text"}
    called = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
    kwargs = {"tools": [{"type": "function", "function": _PROBE}]}
    try:
        asked = tokenizer.render_chat(Chat((user,), template_kwargs=kwargs))
    except UnsupportedParameter:
        return Tools.NONE
    except InvalidRequest:
        return Tools.UNKNOWN
    if "probe_function" not in asked:
        return Tools.NONE
    try:
        texts = [
            tokenizer.render_chat(Chat((user, answer), add_generation_prompt=False, template_kwargs=kwargs))
            for answer in (answered, called)
        ]
    except InvalidRequest:
        return Tools.UNKNOWN
    begin = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    return next((form for form, shown in _SHOWN.items() if shown.match(texts[1], begin)), Tools.UNKNOWN)


# -- Forms of the output -----------------------------------------------------------------------------------------------

MARKS = ("<tool_call>", "<think>", "</think>")  # which may be tokens
_DATA = ("const", "enum", "default", "examples")  # keywords of a schema whose values are no schemas
# Keywords whose values are objects of schemas, with names as keys.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# As in rootward.engine.grammar.
_GUIDANCE = {"whitespace_pattern": r"[ \t\r\n]{1,16}", "lenient": False, "coerce_one_of": False}


def forced_schema(functions: Sequence[FunctionTool], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of one or more calls to any of these functions: a list of {"name": …, "arguments": …}."""
    calls = {"type": "array", "minItems": 1, "items": _any_call(functions, keys=("arguments",))}
    return {**calls, **({} if parallel else {"maxItems": 1}), "$defs": _definitions(functions)}


def grammar_of_choice(
    form: CallFormat,
    functions: Sequence[FunctionTool],
    *,
    parallel: bool,
    output: Mapping[str, Any] | None,
    marks: Collection[str],
) -> str:
    """A Lark grammar (of llguidance) of outputs in which calls are valid, the arguments of strict functions too.

    output: the schema of outputs that are no calls; None: any text. marks: those of `MARKS` that are tokens, which no expression over
    characters matches.
    """
    marked, thoughts = "<tool_call>" in marks, ""
    keys = ("arguments",) if form is CallFormat.HERMES else ("parameters", "arguments")
    strict = [one if one.strict else one.model_copy(update={"parameters": {}}) for one in functions]
    call = {**_any_call(strict, keys=keys), "$defs": _definitions(strict)}
    rules = [f"call: %json {_guided(call)}", r"BLANKS: /[ \t\r\n]{1,16}/"]
    hermes = form is CallFormat.HERMES
    # No text spells the mark of a call, even if the mark is a token.
    anything = r"/(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/" if hermes else r"/(.|\n)*/"
    if output is None and "</think>" in marks:
        thoughts = "thoughts?"
        # The prompt may have opened them. If calls have no mark the model must open them, or any text would be thoughts.
        rules.append(f"thoughts: {'(BLANKS? <think>)?' if hermes else 'BLANKS? <think>'} THOUGHT </think>")
        rules.append(f"THOUGHT: {anything}")
    if hermes:
        opening, closing = ("<tool_call>", "</tool_call>") if marked else ('"<tool_call>"', '"</tool_call>"')
        rules += [f"body: BLANKS? call BLANKS? {closing}", "text: TEXT", f"TEXT: {anything}"]
        if output is not None:
            more = f"(BLANKS? {opening} body)*" if parallel else ""
            rules.append(f"start: form | {opening} body {more}")
        else:
            rules.append(f"opened: TEXT {opening}" if marked else r"opened[lazy]: /(.|\n)*<tool_call>/")
            rules.append(f"start: {thoughts} (opened body){'*' if parallel else '?'} text")
    else:
        more = '(";" BLANKS? call)*' if parallel else ""
        rules += [r"TEXT: /([ \t\r\n]*[^\[{ \t\r\n](.|\n)*)?/", "text: TEXT", f"start: {thoughts} (text | call {more})"]
    if output is not None:
        rules.append(f"form: %json {_guided(output)}")
    return "\n".join(["%llguidance {}", *rules])


def _guided(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _GUIDANCE})


def _any_call(functions: Sequence[FunctionTool], *, keys: Sequence[str]) -> dict[str, Any]:
    """The schema of a call to any of these functions. keys: names that the arguments may have."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, key: {"$ref": f"#/$defs/{function.name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for function in functions
        for key in keys
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _definitions(functions: Sequence[FunctionTool]) -> dict[str, Any]:
    """The parameters of each function under its name, with their references moved there from the root."""
    return {f.name: _moved(f.parameters or {"type": "object"}, f"#/$defs/{f.name}") for f in functions}


def _moved(schema: Any, root: str) -> Any:
    """The schema, or a list of schemas, with references to its root moved to `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(item, root) for name, item in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, root)
    return moved


# -- Calls in a text ---------------------------------------------------------------------------------------------------

# Between values; bounded, because every piece of text matches it again.
_BETWEEN = r"[\s;,\[\]}]{0,64}"
# The next part of a region of calls: its end or the next mark, the beginning of a value, or (Mistral) a name before its arguments.
_NEXT = {
    CallFormat.HERMES: regex.compile(_BETWEEN + r"(?:(?P<end></tool_call>|(?=<tool_call>))|(?=\{))"),
    CallFormat.MISTRAL: regex.compile(
        _BETWEEN
        + r"(?:(?P<end>(?=\[TOOL_CALLS\]))|(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w{0,64})?\[ARGS\]\s{0,64}(?=\{)|(?=\{))"
    ),
    CallFormat.JSON: regex.compile(_BETWEEN + r"(?=\{)"),
}
_KEYS = ("name", "arguments", "parameters", "type", "id")
_FIRST_KEY = regex.compile(r'\{\s{0,64}"(?:' + "|".join(_KEYS) + r')"\s{0,64}:')
# A call up to its arguments, if they are an object and come last, as models write them.
_HEAD = regex.compile(
    r'\{\s{0,64}(?:"(?:type|id)"\s{0,64}:\s{0,64}"[^"\\]{0,64}"\s{0,64},\s{0,64}){0,2}'
    r'"name"\s{0,64}:\s{0,64}"(?P<name>[^"\\]{0,64})"\s{0,64},\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
_REST = regex.compile(r'\s{0,64}(?:\}|(?P<more>,)(?=\s{0,64}"))')  # after the arguments
_CLOSING = regex.compile(r"[\s;,\]}]{0,64}")  # what closes a list of calls
_OUTSIDE, _IN_STRING = re.compile(r'["\[\]{}<]'), re.compile(r'["\\]')


class CallParser:
    """Separates the calls in one text from the rest of it while the text arrives. The parts it returns are final, in the order of the text.

    A call is returned from the first bracket of its arguments on, and these as the model writes them. Everything that is no call of an
    offered function is text, except blanks and list brackets beside calls.
    """

    def __init__(
        self, form: CallFormat, *, names: Iterable[str], function: str = "", forced: bool = False, parallel: bool = True
    ):
        """names: functions that may be called. function: the one whose arguments the whole text is. forced: the form of the output is
        calls, so that nothing is text, even if the output is cut. Without `parallel` only the first call is returned."""
        self._form, self._names, self._forced, self._parallel = form, frozenset(names), forced, parallel
        self._held = ""  # text that may be of a call
        self._blanks: list[str] = []  # at the beginning or after a call; kept before other text, dropped before calls
        self._in_text = False  # other text was returned since the beginning or the last call
        self._ended = False
        self.num_calls = 0  # so far
        self._parts: list[str | CallPart] = []  # that the next `push` returns
        self._reading = self._arguments_of(function) if function else self._calls_and_text()
        next(self._reading)

    def push(self, text: str) -> list[str | CallPart]:
        """Texts and pieces of calls that are final after this piece of text."""
        self._held += text
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[str | CallPart]:
        """The rest, at the end of the text. A call whose arguments are cut stays as it is."""
        self._ended = True
        return self.push("")

    # The steps are generators: each `yield` waits for more text or its end.

    def _calls_and_text(self) -> Generator[None, None, None]:
        mark = self._form.value
        while mark:
            at = self._held.find(mark)
            num_held = 0 if self._ended else held_back(self._held, [mark])
            self._add_text(self._taken(at if at >= 0 else len(self._held) - num_held))
            if at >= 0:
                yield from self._region()
            elif self._ended:
                return
            else:
                yield
        yield from self._region()
        yield from self._pass_on(self._add_text)

    def _pass_on(self, to: Callable[[str], None], until: _Brackets | None = None) -> Generator[None, None, None]:
        """Hand on the text as it arrives, to the end of these brackets or of the text."""
        while True:
            end = until.end(self._held) if until else None
            to(self._taken(len(self._held) if end is None else end))
            if end is not None or self._ended:
                return
            yield

    def _region(self) -> Generator[None, None, None]:
        """Calls one after another. At the end `_held` begins with the text after them. If there are none, their mark is text."""
        at, called = len(self._form.value), False  # nothing is taken before the first call
        while found := _NEXT[self._form].match(self._held, at, partial=not self._ended):
            groups = found.groupdict()
            if found.partial:
                yield
                continue
            if groups.get("end") is not None:
                if not called:
                    break
                self._taken(found.end())
                return
            if name := groups.get("name"):
                if name not in self._names:
                    break
                self._begin_call(name, found.end())
                yield from self._pass_on(self._add_arguments, _Brackets())
            elif not (yield from self._call(found.end())):
                break
            at, called = 0, True
        if not called:
            self._add_text(self._taken(len(self._form.value)))
        else:
            self._taken(_CLOSING.match(self._held).end())

    def _call(self, at: int) -> Generator[None, None, bool]:
        """Whether a call begins at this place. It is then taken."""
        brackets, num_seen = _Brackets(), at
        while _FIRST_KEY.match(self._held, at, partial=True):
            if head := _HEAD.match(self._held, at):
                if head["name"] not in self._names:
                    return False
                self._begin_call(head["name"], head.end())
                yield from self._pass_on(self._add_arguments, _Brackets())
                yield from self._rest_of_call()
                return True
            num_more = brackets.end(self._held[num_seen:])
            if num_more is not None:
                known = _known_call(self._held[at : num_seen + num_more])
                if known is None or known[0] not in self._names:
                    return False
                self._begin_call(known[0], num_seen + num_more)
                self._add_arguments(known[1])
                return True
            num_seen = len(self._held)
            if self._ended:
                return False
            yield
        return False

    def _rest_of_call(self) -> Generator[None, None, None]:
        """Skip the rest of a call after its arguments."""
        while (found := _REST.match(self._held, partial=not self._ended)) and found.partial:
            yield
        if found is None:
            return
        self._taken(found.end())
        if found["more"]:
            yield from self._pass_on(lambda text: None, _Brackets(depth=1))

    def _arguments_of(self, function: str) -> Generator[None, None, None]:
        while not self._held and not self._ended:
            yield
        self._begin_call(function, 0)
        yield from self._pass_on(self._add_arguments)

    def _taken(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _add_text(self, text: str) -> None:
        if text:
            self._blanks.append(text)
        whole = self._in_text or text.strip() or (self._ended and not self.num_calls)
        if whole and self._blanks and not self._forced:
            self._parts.append("".join(self._blanks))
            self._in_text, self._blanks = True, []

    def _begin_call(self, name: str, num_taken: int) -> None:
        self._taken(num_taken)
        self.num_calls += 1
        self._in_text, self._blanks = False, []
        if self._parallel or self.num_calls == 1:
            self._parts.append(CallPart(self.num_calls - 1, name, ""))

    def _add_arguments(self, arguments: str) -> None:
        if arguments and (self._parallel or self.num_calls == 1):
            self._parts.append(CallPart(self.num_calls - 1, "", arguments))


class _Brackets:
    """Finds the end of a JSON object in a text that arrives in pieces: after its last closing bracket, or before a "<", which JSON has only
    in strings. depth: number of brackets that are open before the text."""

    def __init__(self, depth: int = 0):
        self._depth, self._quoted, self._escaped = depth, False, False

    def end(self, text: str) -> int | None:
        """The position of the end in this piece; None if it comes later."""
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while found := (_IN_STRING if self._quoted else _OUTSIDE).search(text, at):
            at, mark = found.end(), found[0]
            if mark == '"':
                self._quoted = not self._quoted
            elif mark == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark == "<":
                return found.start()
            else:
                self._depth += 1 if mark in "[{" else -1
                if self._depth == 0:
                    return at
        return None


def _known_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call as a JSON value; None for any other text."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if not isinstance(value, dict) or not set(value) <= set(_KEYS) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_no_constant)
        if not isinstance(arguments, dict | None):
            return None
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)  # 1e999 has become infinity
        return value["name"], text if is_text(text) else json.dumps(arguments)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
