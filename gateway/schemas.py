"""The bodies of the HTTP API as pydantic models: OpenAI's fields, vLLM's extensions and our own.

A request model validates one body and makes the `GenerateRequest` that the service takes; `gateway.http_errors` turns what pydantic refuses
into "field: value, fix". Null means absent, as in OpenAI's API. Unknown names are refused, so that a parameter is never ignored in
silence. The answer models describe answers in `/openapi.json` only: answers themselves are plain dicts (`gateway.answers`), which keeps
validation out of the path of a token.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.auth import tenant
from gateway.planning import refusing
from gateway.requests import VERIFICATIONS, Chat, GenerateRequest, Resume
from gateway.tools import CallFormat, Tools, forced_schema, grammar_of_choice
from rootward.core.requests import (
    MAX_BIASES,
    MAX_LOGPROBS,
    DraftStrategy,
    FinishReason,
    Form,
    Sampling,
    Speculation,
    SpeculationMode,
    Structure,
)
from rootward.errors import InvalidRequest, UnsupportedParameter

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it
MAX_DIGITS = 12  # of a number in a header
MAX_MESSAGES = 4096  # of a conversation
MAX_STREAM_INTERVAL = 1024  # tokens
MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool")


def refused(fix: str, *, unsupported: bool = False) -> PydanticCustomError:
    """The error of a value that has the right type; `fix` completes the message "field: value fix"."""
    return PydanticCustomError("unsupported" if unsupported else "refused", fix)


def at_most(most: int, noun: str) -> BeforeValidator:
    """Refuses longer lists and objects before their items are looked at."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > most:
            raise refused(f"has {len(value)} {noun}, more than {most}; send fewer")
        return value

    return BeforeValidator(check)


def _whole(value: object) -> object:
    """JSON has one kind of number: 3.0 is the integer 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _none_if_false(value: object) -> object:
    return None if value is False else _whole(value)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


WHOLE = BeforeValidator(_whole)  # after the bounds, so that they stand in the JSON schema
Number = Annotated[float, AllowInfNan(False)]
Count = Annotated[int, Field(ge=0), WHOLE]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]  # no BeforeValidator: there may be hundreds of thousands in a body
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
DraftSize = Annotated[int, Field(ge=1, le=1024), WHOLE]
Logprobs = Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_none_if_false)]


class Body(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    # Names that are not served -> the values of them that ask for nothing and are accepted.
    harmless: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: object) -> object:
        """Without nulls and harmless values. One unknown name is kept to be refused: thousands would make thousands of errors."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: value for name, value in data.items() if value is not None and not cls._is_harmless(name, value)}
        unknown = next((name for name in given if name not in known), None)
        return {name: value for name, value in given.items() if name in known or name == unknown}

    @classmethod
    def _is_harmless(cls, name: str, value: object) -> bool:
        return any(value == one and type(value) in (type(one), float) for one in cls.harmless.get(name, ()))


# -- Requests -----------------------------------------------------------------------------------------------------------


def _text_part(value: str) -> str:
    if value != "text":
        raise refused("is not supported; this model reads text alone", unsupported=True)
    return value


class TextPart(Body):
    type: Annotated[str, AfterValidator(_text_part), WithJsonSchema({"const": "text"})]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


def text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _role(value: str) -> str:
    if value == "function":
        raise refused("is not supported; use 'tool'", unsupported=True)
    if value not in ROLES:
        raise refused(f"is unknown; use one of {', '.join(ROLES)}")
    return value


class CalledFunction(Body):
    name: str
    arguments: str  # JSON


class CallInMessage(Body):
    """A tool call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Count = 0  # of a stream's chunks, which clients put together


class Message(Body):
    harmless: ClassVar = {"annotations": ([],), "name": ("",)}

    role: Annotated[str, AfterValidator(_role), WithJsonSchema({"enum": list(ROLES)})]
    content: Content | None = None
    name: str = ""
    tool_calls: Annotated[list[CallInMessage], Field(fail_fast=True)] = []
    tool_call_id: str = ""
    reasoning_content: str = ""  # of an earlier answer
    refusal: str = ""  # of an earlier answer of another server: its text, where there is no other

    def for_template(self, at: str) -> Mapping[str, object]:
        """As chat templates read it: they know the role "system" only, and arguments as objects. InvalidRequest names the field, whose
        path begins with `at`."""
        if self.content is None and not self.tool_calls and not self.refusal:
            raise InvalidRequest(f"{at}.content", None, "is missing; send a text or a list of parts")
        role = "system" if self.role == "developer" else self.role
        named = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        message: dict[str, object] = {"role": role, "content": text_of(self.content or self.refusal)}
        message |= {name: value for name, value in named.items() if value}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
                for call, arguments in zip(self.tool_calls, self._arguments(at), strict=True)
            ]
        return message

    def _arguments(self, at: str) -> Iterator[object]:
        for i, call in enumerate(self.tool_calls):
            try:
                yield json.loads(call.function.arguments or "{}")
            except (ValueError, RecursionError):
                given = call.function.arguments[:32]
                raise InvalidRequest(f"{at}.tool_calls[{i}].function.arguments", given, "is no JSON") from None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES, "messages")]


class Conversation(Body):
    """The fields of a body that make a chat prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    def chat(self, messages: list[Message]) -> Chat:
        """InvalidRequest if an answer is both begun and continued."""
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        if self.continue_final_message and opens:
            fix = "is given with continue_final_message; an answer is either begun or continued"
            raise InvalidRequest("add_generation_prompt", True, fix)
        rendered = tuple(message.for_template(f"messages[{i}]") for i, message in enumerate(messages))
        return Chat(rendered, opens, self.continue_final_message, self.chat_template_kwargs)


class StreamOptions(Body):
    harmless: ClassVar = {"include_obfuscation": (False, True)}

    include_usage: bool = False  # one more chunk with the usage
    continuous_usage_stats: bool = False  # the usage so far in every chunk


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content


class JsonSchema(Body):
    name: str = ""
    description: str = ""
    strict: bool = False
    schema_: dict[str, Any] = Field(alias="schema")


def schema_text(field: str, schema: Mapping[str, Any]) -> str:
    """The schema as JSON. InvalidRequest names the field of one that is nested too deeply to be written."""
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(field, "a schema", "is nested too deeply; make it flatter") from None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise refused("has no json_schema.schema; send a schema object")
        if self.type != "json_schema" and self.json_schema is not None:
            raise refused(
                f"has a json_schema beside the type {self.type!r}; use the type 'json_schema' or leave it out"
            )
        return self

    @property
    def structure(self) -> Structure | None:
        if self.json_schema is not None and self.type == "json_schema":
            text = schema_text("response_format.json_schema.schema", self.json_schema.schema_)
            return Structure(Form.JSON_SCHEMA, text)
        return Structure(Form.JSON_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's: the form of the output, in one of these ways."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> StructuredOutputs:
        forms = (self.json_, self.json_object or None, self.regex, self.grammar, self.choice)
        if sum(form is not None for form in forms) != 1:
            raise refused("is not one form; use an object with json, json_object, regex, choice or grammar")
        return self

    @property
    def structure(self) -> Structure:
        if self.json_ is not None:
            given = self.json_
            text = given if isinstance(given, str) else schema_text("structured_outputs.json", given)
            return Structure(Form.JSON_SCHEMA, text)
        if self.regex is not None:
            return Structure(Form.REGEX, self.regex)
        if self.grammar is not None:
            return Structure(Form.GRAMMAR, self.grammar)
        if self.choice is not None:
            texts = (json.dumps(text, ensure_ascii=False) for text in self.choice)
            return Structure(Form.GRAMMAR, "start: " + " | ".join(texts))
        return Structure(Form.JSON_OBJECT)


FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]


class FunctionTool(Body):
    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False  # calls that the model chooses are valid as well; forced ones always are


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _names_what_it_says(self) -> ToolChoice:
        if self.function is not None and self.type != "function":
            raise refused(f"has a function beside the type {self.type!r}; use the type 'function' or leave it out")
        return self


def typed_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Mode = Literal["auto", "disabled", "required"]


class SpeculationOptions(Body):
    mode: Mode = "auto"
    verification: Literal["traversal", "coupled", "token", "block", "multi_step"] | None = None
    draft_strategy: str | None = None
    max_depth: DraftSize | None = None
    topk: DraftSize | None = None
    num_draft_tokens: DraftSize | None = None
    drafter: str = ""

    @property
    def speculation(self) -> Speculation:
        rule, draft_mode = VERIFICATIONS[self.verification] if self.verification else (None, None)
        return Speculation(
            SpeculationMode(self.mode),
            rule,
            draft_mode,
            num_draft_tokens=self.num_draft_tokens,
            max_depth=self.max_depth,
            topk=self.topk,
            drafter=self.drafter,
            strategy=DraftStrategy.parse(self.draft_strategy) if self.draft_strategy is not None else None,
        )


def _speculation_options(value: object) -> object:
    if isinstance(value, bool):
        return {"mode": "auto" if value else "disabled"}
    if isinstance(value, str):
        return {"mode": value}
    if not isinstance(value, dict | SpeculationOptions):
        raise refused("is neither a boolean nor a mode nor an object")
    return value


SpeculationField = Annotated[
    SpeculationOptions,
    BeforeValidator(_speculation_options, json_schema_input_type=bool | Mode | SpeculationOptions),
]


class CommonFields(Body):
    """What every generating endpoint takes under the same name."""

    model: str = ""
    stream: bool = False
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**32), WHOLE] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE] | None = None
    speculation: SpeculationField | None = None
    cache_salt: str = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE] = 0
    session_id: str = ""
    # Labels of the client for its own records; nothing depends on them.
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""


class GenerationBody(CommonFields):
    """What completions and chats take."""

    harmless: ClassVar = {
        "best_of": (1,),
        "length_penalty": (1,),
        "use_beam_search": (False,),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "service_tier": ("auto", "default"),
    }

    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=0, le=MAX_STREAM_INTERVAL), WHOLE] = 0
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128), WHOLE] = 1
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,20}$")], Number], at_most(MAX_BIASES, "entries")
    ] = {}
    allowed_token_ids: TokenIds = []
    bad_words: Texts = []
    stop: Annotated[Texts, BeforeValidator(_listed, json_schema_input_type=str | list[str])] = []
    stop_token_ids: TokenIds = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_trees: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = None
    prompt_logprobs: Logprobs = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: str = ""
    metadata: dict[str, Any] = {}  # a label, as `user`

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        """Raises InvalidRequest rather than pydantic's errors: the fields stand at the top level, so it can name them."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "given", "without 'stream': true; leave it out")
        if self.return_trees and not self.stream:
            raise InvalidRequest("return_trees", True, "without 'stream': true; trees are told as they are verified")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest("max_tokens", old, f"disagrees with max_completion_tokens {new}; send one of them")
        form = self.response_format.structure if self.response_format else None
        if form is not None and self.structured_outputs is not None:
            raise InvalidRequest("structured_outputs", "given", "beside response_format; send one of them")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Several prompts, where the endpoint takes them; () means the request's own."""
        return ()

    @property
    def echoes(self) -> bool:
        """The prompt stands in front of the text."""
        return False

    @property
    def only_echoes(self) -> bool:
        """And there is no text."""
        return False

    @property
    def most_tokens(self) -> int | None:
        """`max_tokens` under either of its names."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def request(self, headers: Mapping[str, str]) -> GenerateRequest:
        """What the service is asked. InvalidRequest names the field that cannot be served."""
        with refusing():
            return GenerateRequest(
                **self._prompt(),
                request_id=self.request_id or headers.get("x-request-id", ""),
                model=self.model,
                n=self.n,
                sampling=self._sampling(),
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                include_stop=self.include_stop_str_in_output,
                ignore_eos=self.ignore_eos,
                skip_special_tokens=self.skip_special_tokens,
                seed=None if self.seed is None else self.seed % 2**64,
                speculation=self.speculation.speculation if self.speculation else Speculation(),
                session_id=self.session_id or headers.get("x-session-id", ""),
                deadline_s=_deadline_s(headers.get("x-request-timeout-ms")),
                min_tokens=self.min_tokens,
                structure=self._structure(),
                bad_words=tuple(self.bad_words),
                trees=self.return_trees,
                prediction=text_of(self.prediction.content) if self.prediction else "",
                traceparent=headers.get("traceparent", ""),
                cache_salt=self.cache_salt,
                priority=self.priority,
                tenant=tenant(headers),
                resume=_resume(headers.get("last-event-id")),
                truncate_prompt=self.truncate_prompt_tokens,
                add_special_tokens=self.add_special_tokens,
            )

    def _prompt(self) -> dict[str, Any]:
        """`prompt` and the other fields of `GenerateRequest` that the endpoints write in their own ways."""
        raise NotImplementedError

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=max(0, self.top_k),  # vLLM writes "all" as -1
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            allowed_token_ids=tuple(self.allowed_token_ids),
        )

    def _structure(self) -> Structure | None:
        if self.structured_outputs is not None:
            return self.structured_outputs.structure
        return self.response_format.structure if self.response_format else None


def _prompts(value: object) -> object:
    """A list of prompts, each a text or token ids, from any of the four spellings."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise refused("is neither a text nor token ids; send a string or a list of token ids")
    return [value] if isinstance(value[0], int) else value


Prompt = str | Annotated[TokenIds, Field(min_length=1)]


class CompletionRequest(GenerationBody):
    """POST /v1/completions"""

    harmless: ClassVar = {**GenerationBody.harmless, "suffix": ("",)}

    prompt: Annotated[
        list[Prompt],
        Field(fail_fast=True),
        BeforeValidator(_prompts, json_schema_input_type=str | TokenIds | Texts | list[TokenIds]),
    ]
    echo: bool = False
    logprobs: Logprobs = None

    @model_validator(mode="after")
    def _echo_is_whole(self) -> CompletionRequest:
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo", True, "cannot be combined with truncate_prompt_tokens; send one of them")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt)

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def only_echoes(self) -> bool:
        return self.echo and self.most_tokens == 0

    def _prompt(self) -> dict[str, Any]:
        most = DEFAULT_MAX_TOKENS if self.most_tokens is None else self.most_tokens
        # The tokens of an echoed prompt have log-probabilities if those of the text have them.
        prompt_logprobs = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return {
            "prompt": self.prompts[0],
            "max_tokens": 1 if self.only_echoes else most,
            "logprobs": self.logprobs,
            "prompt_logprobs": prompt_logprobs,
        }


class ChatRequest(GenerationBody, Conversation):
    """POST /v1/chat/completions"""

    harmless: ClassVar = {
        **GenerationBody.harmless,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "echo": (False,),
        "documents": ([],),
    }

    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = []
    tool_choice: (
        Annotated[
            ToolChoice,
            BeforeValidator(typed_choice, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] = 0

    @model_validator(mode="after")
    def _logprobs_are_wanted(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", self.top_logprobs, "is given without 'logprobs': true; send both")
        return self

    @model_validator(mode="after")
    def _tools_are_there(self) -> ChatRequest:
        kind = self.tool_choice.type if self.tool_choice else "auto"
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools", len(names), "functions have a name twice; rename one")
        if kind == "required" and not names:
            raise InvalidRequest("tool_choice", kind, "needs tools; send at least one")
        if kind == "function" and self.function not in names:
            raise InvalidRequest("tool_choice", self.function[:64], "is no function of tools; name one of them")
        if self.tools and kind in ("required", "function") and super()._structure() is not None:
            fix = "cannot be combined with another form of the output (response_format, structured_outputs, text.format); send one of them"
            raise InvalidRequest("tool_choice", kind, fix)
        return self

    @property
    def function(self) -> str:
        """The one function that `tool_choice` names; "": none."""
        named = self.tool_choice.function if self.tool_choice else None
        return named.name if named else ""

    @property
    def forces_calls(self) -> bool:
        """The whole output is calls."""
        return bool(self.tools) and self.tool_choice is not None and self.tool_choice.type in ("required", "function")

    @property
    def has_form(self) -> bool:
        """The output has a form, whether it calls or not."""
        return self.forces_calls or super()._structure() is not None

    def call_format(self, known: CallFormat | Tools) -> CallFormat | None:
        """How calls are written in the answer; None where there are none.

        known: that of the model. UnsupportedParameter if the model's template has no tools, or a format that is not known here."""
        if not self.tools or (self.tool_choice and self.tool_choice.type == "none"):
            return None
        if self.forces_calls:
            return CallFormat.JSON
        if isinstance(known, Tools):
            fix = f"functions {known.value}; use tool_choice 'required' or a function's name"
            if known is Tools.UNKNOWN:
                fix += ", or set tool_call_format of the gateway"
            raise UnsupportedParameter("tools", len(self.tools), fix)
        return known

    def structure(self, form: CallFormat | None, *, marks: Collection[str]) -> Structure | None:
        """The form of an output that may have calls in this format. marks: as in `grammar_of_choice`. UnsupportedParameter where
        calls cannot be kept valid, or cannot stand beside the form that is asked for."""
        own = self._structure()
        strict = next((i for i, tool in enumerate(self.tools) if tool.function.strict), None)
        if form is None or self.forces_calls or (own is None and strict is None):
            return own
        if own is not None and (form is not CallFormat.HERMES or own.form not in (Form.JSON_SCHEMA, Form.JSON_OBJECT)):
            fix = "functions beside this form of the output cannot be told from it; use tool_choice 'none' or 'required', or leave it out"
            raise UnsupportedParameter("tools", len(self.tools), fix)
        if form is CallFormat.MISTRAL:
            fix = "is not kept in the format of this model's calls; use tool_choice 'required' or a function's name"
            raise UnsupportedParameter(f"tools[{strict}].function.strict", True, fix)
        functions, parallel = [tool.function for tool in self.tools], self.parallel_tool_calls
        try:
            output = None if own is None else json.loads(own.text or '{"type": "object"}')
            text = grammar_of_choice(form, functions, parallel=parallel, output=output, marks=marks)
        except RecursionError:
            raise InvalidRequest("tools", "a schema", "is nested too deeply; make it flatter") from None
        except (TypeError, ValueError):  # of the text that `structured_outputs.json` may be
            raise InvalidRequest("structured_outputs.json", "a text", "is no JSON object") from None
        return Structure(Form.GRAMMAR, text)

    def _structure(self) -> Structure | None:
        if not self.forces_calls:
            return super()._structure()
        functions = [tool.function for tool in self.tools]
        try:
            if self.function:
                (named,) = [function for function in functions if function.name == self.function]
                schema = named.parameters or {"type": "object"}
            else:
                schema = forced_schema(functions, parallel=self.parallel_tool_calls)
        except RecursionError:
            raise InvalidRequest("tools", "a schema", "is nested too deeply; make it flatter") from None
        return Structure(Form.JSON_SCHEMA, schema_text("tools", schema))

    def chat(self, messages: list[Message]) -> Chat:
        chat = super().chat(messages)
        if not self.tools or (self.tool_choice and self.tool_choice.type == "none"):
            return chat
        tools = [tool.model_dump(exclude_defaults=True) for tool in self.tools]
        return replace(chat, template_kwargs={**chat.template_kwargs, "tools": tools})

    def _prompt(self) -> dict[str, Any]:
        return {
            "prompt": self.chat(self.messages),
            "max_tokens": self.most_tokens,
            "logprobs": self.top_logprobs if self.logprobs else None,
            "prompt_logprobs": self.prompt_logprobs,
        }


class TokenizeRequest(Conversation):
    """POST /tokenize, as vLLM has it: a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    model: str = ""
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @property
    def text_or_chat(self) -> str | Chat:
        if self.prompt is not None:
            return self.prompt
        if self.messages is not None:
            return self.chat(self.messages)
        raise InvalidRequest("prompt", None, "is missing; send a string, or messages")


class DetokenizeRequest(Body):
    """POST /detokenize"""

    tokens: TokenIds
    model: str = ""
    skip_special_tokens: bool = False


def _deadline_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal()) or len(header) > MAX_DIGITS or int(header) < 1:
        raise InvalidRequest("x-request-timeout-ms", header[:16], "is no number of milliseconds above 0")
    return int(header) / 1000


def _resume(header: str | None) -> Resume | None:
    """Ids of events are output positions, so the last one that a client saw is where it goes on."""
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal()) or len(header) > MAX_DIGITS:
        raise InvalidRequest("last-event-id", header[:16], "is no id of an event of this server")
    return Resume(int(header))


# -- Answers. Clients may rely on what is required here; more fields come where they are asked for. ---------------------


class Object(BaseModel):
    model_config = ConfigDict(extra="allow")


class PromptDetails(Object):
    cached_tokens: Count


class CompletionDetails(Object):
    reasoning_tokens: Count


class UsageCounts(Object):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopToken(Object):
    token: str
    logprob: Annotated[float, Field(le=0)]
    bytes: list[Count] | None


class TokenInfo(TopToken):
    top_logprobs: list[TopToken]


class ChatLogprobs(Object):
    content: list[TokenInfo]
    refusal: None


class CompletionLogprobs(Object):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class Choice(Object):
    index: Count
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class AnsweredFunction(Object):
    name: str
    arguments: str  # JSON


class AnsweredCall(Object):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(Object):
    role: Literal["assistant"]
    content: str | None  # null where there are only tool calls
    refusal: None
    reasoning_content: str = ""  # where there are thoughts that are told apart
    tool_calls: list[AnsweredCall] = []


class ChatChoice(Choice):
    message: AnsweredMessage
    logprobs: ChatLogprobs | None


class FunctionDelta(Object):
    name: str = ""  # in the first chunk of a call
    arguments: str  # the next piece


class CallDelta(Object):
    index: Count
    id: str = ""  # with `type` in the first chunk of a call
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Object):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = []


class ChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None


class Generated(Object):
    id: str
    created: Count
    model: str
    system_fingerprint: str
    usage: UsageCounts | None = None  # of a stream: in its last chunk, where it is asked for


class Completion(Generated):
    """An answer of /v1/completions, and an event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(Generated):
    """An event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class Tokens(Object):
    tokens: list[Count]
    count: Count
    max_model_len: Count
    token_strs: list[str] | None


class Text(Object):
    prompt: str


class ModelExtras(Object):
    tree: bool
    verification: list[str]


class ModelCard(Object):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count
    rootward: ModelExtras


class ModelList(Object):
    object: Literal["list"]
    data: Annotated[list[ModelCard], Field(min_length=1)]


class Load(Object):
    server_load: Count
    num_running: Count
    num_waiting: Count
    max_num_seqs: Count
    draining: bool


class Version(Object):
    version: str


class ErrorDetail(Object):
    message: str
    type: str
    param: str | None
    code: str


class Error(Object):
    error: ErrorDetail
