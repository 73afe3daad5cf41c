"""The request bodies of the HTTP API as pydantic models: OpenAI's fields, vLLM's extensions and our own.

A model validates one body and makes the `GenerateRequest` of the service; `gateway.http_errors` turns pydantic's errors into
"field: value, fix". Null means absent, as in OpenAI's API. Unknown names are refused, so that no parameter is ignored in silence.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.auth import tenant
from gateway.grammar_check import MAX_DEPTH, json_depth
from gateway.http_guard import check_structure
from gateway.planning import refusing
from gateway.requests import Chat, GenerateRequest, Resume, speculation_of
from gateway.sampling_defaults import RECOMMENDED
from gateway.tools import CallFormat, Tools, forced_schema, grammar_of_choice
from rootward.core.requests import (
    MAX_BIASES,
    MAX_LOGPROBS,
    Form,
    Sampling,
    Speculation,
    Structure,
)
from rootward.errors import InvalidRequest, UnsupportedParameter

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it
MAX_DIGITS = 12  # of a number in a header
MAX_MESSAGES = 4096  # of a conversation
MAX_TOOLS = 128
MAX_STREAM_INTERVAL = 1024  # tokens
MAX_TOP_LOGPROBS = 20
TEXT_PARTS = ("text", "input_text", "output_text")  # Cursor sends parts of the Responses API to chats
ROLES = ("system", "developer", "user", "assistant", "tool")


def refused(fix: str, *, unsupported: bool = False) -> PydanticCustomError:
    """The error of a value that has the right type; `fix` completes the message "field: value fix"."""
    return PydanticCustomError("unsupported" if unsupported else "refused", fix)


def only(*served: str, fix: str) -> AfterValidator:
    """Refuses, as unsupported, other values that OpenAI's server knows."""

    def check(value: str) -> str:
        if value not in served:
            raise refused(f"is not supported; {fix}", unsupported=True)
        return value

    return AfterValidator(check)


def _not_stored(value: bool) -> bool:
    if value:
        raise refused("is not supported here; send false, or use /v1/responses, which stores answers", unsupported=True)
    return value


def check_belongs(name: str, value: object, *, to: str, kind: str) -> None:
    """Refuses a value that is given beside another type than the one it belongs to."""
    if value and kind != to:
        raise refused(f"has a {name} beside the type {kind!r}; use the type {to!r} or leave it out")


def at_most(most: int, noun: str) -> BeforeValidator:
    """Refuses longer lists and objects before their items are validated."""

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


def _flat(text: str) -> str:
    """Refuses deep nesting, which code that recurses (templates, compilers of grammars) cannot bear."""
    if (depth := json_depth(text)) > MAX_DEPTH:
        raise refused(f"is nested {depth} deep; the limit is {MAX_DEPTH}")
    return text


def spellable(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses what an answer that repeats it could not spell: integers beyond 64 bits, lone surrogates; and deep nesting."""
    try:
        _flat(orjson.dumps(value).decode())
    except TypeError as error:
        raise refused(f"cannot be written as JSON ({error}); change it") from None
    return value


WHOLE = BeforeValidator(_whole)  # written after the bounds, so that these are in the JSON schema
Number = Annotated[float, AllowInfNan(False)]
Count = Annotated[int, Field(ge=0), WHOLE]
# Lower numbers are refused where a request is planned, 0 too unless an echo asks for it: one message for all.
MaxTokens = Annotated[int, Field(json_schema_extra={"minimum": 0}), WHOLE]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]  # no BeforeValidator: there may be hundreds of thousands in a body
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
JsonObject = Annotated[dict[str, Any], AfterValidator(spellable)]
JsonText = Annotated[str, AfterValidator(_flat)]  # a model may have written it, and it may be no JSON
Texts = Annotated[list[str], Field(fail_fast=True)]
DraftSize = Annotated[int, Field(ge=1, le=1024), WHOLE]
Logprobs = Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_none_if_false)]


class Body(BaseModel):
    """An object of a request."""

    # A bound, even of 0, makes pydantic refuse lone surrogates, which no answer can repeat and no store can keep.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, str_min_length=0)

    # Names that are not served -> their values that ask for nothing, which are accepted.
    harmless: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: object) -> object:
        """Drop nulls and harmless values, and all unknown names but the first, since thousands would make thousands of errors."""
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


class Part(Body):
    """A part of a message."""

    type: str
    text: str
    cache_control: dict[str, Any] = {}  # Anthropic's hint to a prefix cache, which other servers' clients keep


class TextPart(Part):
    type: Annotated[
        str,
        only(*TEXT_PARTS, fix="this model reads text alone"),
        WithJsonSchema({"enum": list(TEXT_PARTS)}),
    ]


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


def text_of(content: str | Sequence[Part], *, between: str = "") -> str:
    return content if isinstance(content, str) else between.join(part.text for part in content)


def arguments_within_limits(value: object) -> object:
    """Refuses items whose arguments of calls, together, have more values than a body may have: they are JSON in texts, which the check of
    the body does not see."""
    texts: list[bytes] = []
    for item in value if isinstance(value, list) else ():
        calls = item.get("tool_calls") if isinstance(item, dict) else None
        functions = (
            [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        )
        for holder in (item, *functions):
            arguments = holder.get("arguments") if isinstance(holder, dict) else None
            if isinstance(arguments, str):
                texts.append(arguments.encode(errors="replace"))
    check_structure(*texts, field="messages")
    return value


def _role(value: str) -> str:
    if value == "function":
        raise refused("is not supported; use 'tool'", unsupported=True)
    if value not in ROLES:
        raise refused(f"is unknown; use one of {', '.join(ROLES)}")
    return value


class CalledFunction(Body):
    name: str
    arguments: JsonText


class CallInMessage(Body):
    """A tool call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Count = 0  # of a stream's chunks, which clients put together

    def for_template(self) -> Mapping[str, object]:
        """The call with its arguments as an object; as the text that the model wrote if they are no JSON."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Body):
    harmless: ClassVar = {"annotations": ([],)}

    role: Annotated[str, AfterValidator(_role), WithJsonSchema({"enum": list(ROLES)})]
    name: str = ""
    tool_calls: Annotated[list[CallInMessage], Field(fail_fast=True)] = []
    tool_call_id: str = ""
    reasoning_content: str = ""  # of an earlier answer
    reasoning: str = ""  # the same under vLLM's and OpenRouter's name
    refusal: str = ""  # of an earlier answer of another server: its text, where there is no other
    content: Annotated[Content | None, Field(validate_default=True)] = None  # last, since its check looks at the others

    @field_validator("content")
    @classmethod
    def _content_is_there(cls, content: Content | None, info: ValidationInfo) -> Content | None:
        if content is None and not info.data.get("tool_calls") and not info.data.get("refusal"):
            raise refused("is missing; send a text or a list of parts")
        return content

    def for_template(self) -> Mapping[str, object]:
        """The message for chat templates, which know the role "system" only, and arguments as objects."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, object] = {"role": role, "content": text_of(self.content or self.refusal, between="\n")}
        for name in ("name", "tool_call_id"):
            if value := getattr(self, name):
                message[name] = value
        if thoughts := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thoughts
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


Messages = Annotated[
    list[Message],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(arguments_within_limits),
    at_most(MAX_MESSAGES, "messages"),
]


class Conversation(Body):
    """The fields that make a chat prompt of messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject = {}

    def chat(self, messages: list[Message]) -> Chat:
        """InvalidRequest if an answer is both begun and continued."""
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        if self.continue_final_message and opens:
            fix = "is given with continue_final_message; an answer is either begun or continued"
            raise InvalidRequest("add_generation_prompt", True, fix)
        rendered = tuple(message.for_template() for message in messages)
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
    schema_: JsonObject = Field(alias="schema")


def structure_of(field: str, form: Form, text: str) -> Structure:
    """A form of the output that the gateway wrote down. InvalidRequest, with the name of its field, if it is too long."""
    try:
        return Structure(form, text)
    except ValueError as error:  # names the form, which the client may not have sent
        raise InvalidRequest.from_message(f"{field}: {str(error).partition(': ')[2]}") from error


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(None, alias="schema")  # llama.cpp's place of it, beside either type

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise refused("has no json_schema.schema; send a schema object")
        check_belongs("json_schema", self.json_schema, to="json_schema", kind=self.type)
        if self.schema_ is not None and (self.type == "text" or self.json_schema is not None):
            raise refused("has a schema beside json_schema or the type 'text'; send one of them")
        return self

    @property
    def structure(self) -> Structure | None:
        schema, field = self.schema_, "response_format.schema"
        if self.json_schema is not None:
            schema, field = self.json_schema.schema_, "response_format.json_schema.schema"
        if schema is not None:
            return structure_of(field, Form.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
        return Structure(Form.JSON_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's: the form of the output, given in one of these ways."""

    # `Structure` checks its text itself, so there is no bound here.
    model_config = ConfigDict(
        json_schema_extra={"minProperties": 1, "maxProperties": 1},
        str_min_length=None,  # type: ignore[typeddict-item]  # pydantic's type has no name for "not set"
    )

    json_: JsonObject | JsonText | None = Field(None, alias="json")
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
        with refusing():
            if self.json_ is not None:
                text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_, ensure_ascii=False)
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
    parameters: JsonObject = {}
    strict: bool = False  # calls that the model chooses are valid as well; forced ones always are


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool
    cache_control: Annotated[dict[str, Any], Field(exclude=True)] = {}  # as that of a part; no template sees it


class NamedFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _names_what_it_says(self) -> ToolChoice:
        check_belongs("function", self.function, to="function", kind=self.type)
        return self


def choice_of(kind: type[Body]) -> BeforeValidator:
    """Takes a tool choice of this kind also by its type alone."""

    def typed(value: object) -> object:
        return {"type": value} if isinstance(value, str) else value

    return BeforeValidator(typed, json_schema_input_type=Literal["none", "auto", "required"] | kind)


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
        return speculation_of(**dict(self))


def _speculation_options(value: object) -> object:
    if isinstance(value, bool):
        return {"mode": "auto" if value else "disabled"}
    if isinstance(value, str):
        return {"mode": value}
    if not isinstance(value, dict | SpeculationOptions):
        raise refused("is neither a boolean nor a mode nor an object")
    return value


class CommonFields(Body):
    """The fields that all generating endpoints have."""

    model: str = ""
    stream: bool = False
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**32), WHOLE] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), WHOLE] | None = None
    speculation: (
        Annotated[
            SpeculationOptions,
            BeforeValidator(_speculation_options, json_schema_input_type=bool | Mode | SpeculationOptions),
        ]
        | None
    ) = None
    cache_salt: str = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE] = 0
    session_id: str = ""
    # Labels of the client for its own records; nothing depends on them.
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""


class GenerationBody(CommonFields):
    """The fields of completions and chats."""

    harmless: ClassVar = {
        "best_of": (1,),
        "length_penalty": (1,),
        "use_beam_search": (False,),
        "spaces_between_special_tokens": (True,),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory", "24h"),
        "include_reasoning": (True,),
        "return_tokens_as_token_ids": (False,),
        "cache_prompt": (True,),  # of llama.cpp
    }

    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=0, le=MAX_STREAM_INTERVAL), WHOLE] = 0
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
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
    store: Annotated[bool, AfterValidator(_not_stored)] = False

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        """Raises InvalidRequest, not pydantic's errors, because it names a field of the body."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "given", "without 'stream': true; leave it out")
        if self.return_trees and not self.stream:
            raise InvalidRequest("return_trees", True, "without 'stream': true; trees are sent as they are verified")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest("max_tokens", old, f"disagrees with max_completion_tokens {new}; send one of them")
        form = self.response_format.structure if self.response_format else None
        if form is not None and self.structured_outputs is not None:
            raise InvalidRequest("structured_outputs", "given", "beside response_format; send one of them")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts of an endpoint that takes several; () for one whose request has the only prompt."""
        return ()

    @property
    def echoes(self) -> bool:
        """The answer begins with the prompt."""
        return False

    @property
    def only_echoes(self) -> bool:
        """The answer is the prompt alone."""
        return self.echoes and self.most_tokens == 0

    @property
    def most_tokens(self) -> int | None:
        """`max_tokens` under either of its names."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def request(self, headers: Mapping[str, str], defaults: Sampling | None = None) -> GenerateRequest:
        """The request to the service. defaults: of sampling parameters that are not given (None: OpenAI's).

        InvalidRequest names the field that cannot be served."""
        fix = "is no number of milliseconds above 0"
        timeout_ms = _header_number(headers, "x-request-timeout-ms", least=1, fix=fix)
        offset = _header_number(headers, "last-event-id", least=0, fix="is no id of an event of this server")
        with refusing():
            return GenerateRequest(
                **self._prompt(),
                request_id=self.request_id or headers.get("x-request-id", ""),
                model=self.model,
                n=self.n,
                sampling=self._sampling(defaults or Sampling()),
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                include_stop=self.include_stop_str_in_output,
                ignore_eos=self.ignore_eos,
                skip_special_tokens=self.skip_special_tokens,
                seed=None if self.seed is None else self.seed % 2**64,
                speculation=self.speculation.speculation if self.speculation else Speculation(),
                session_id=self.session_id or headers.get("x-session-id", ""),
                deadline_s=None if timeout_ms is None else timeout_ms / 1000,
                min_tokens=self.min_tokens,
                structure=self.output_form,
                bad_words=tuple(self.bad_words),
                trees=self.return_trees,
                prediction=text_of(self.prediction.content) if self.prediction else "",
                traceparent=headers.get("traceparent", ""),
                cache_salt=self.cache_salt,
                priority=self.priority,
                tenant=tenant(headers),
                # Ids of events are output positions: the last one that a client received is its offset.
                resume=None if offset is None else Resume(offset),
                truncate_prompt=self.truncate_prompt_tokens,
                add_special_tokens=self.add_special_tokens,
            )

    def _prompt(self) -> dict[str, Any]:
        """`prompt` and the other fields of `GenerateRequest` whose names or defaults differ between endpoints."""
        raise NotImplementedError

    def _sampling(self, defaults: Sampling) -> Sampling:
        given = {name: getattr(self, name) for name in RECOMMENDED if name in self.model_fields_set}
        if "top_k" in given:
            given["top_k"] = max(0, self.top_k)  # vLLM writes "all" as -1
        return replace(
            defaults,
            **given,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            allowed_token_ids=tuple(self.allowed_token_ids),
        )

    @property
    def output_form(self) -> Structure | None:
        """The form of the output that the request asks for."""
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

    def _prompt(self) -> dict[str, Any]:
        most = DEFAULT_MAX_TOKENS if self.most_tokens is None else self.most_tokens
        # Tokens of an echoed prompt have log-probabilities if tokens of the text have them.
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
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Annotated[ToolChoice, choice_of(ToolChoice)] = ToolChoice(type="auto")
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
        kind = self.tool_choice.type
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools", len(names), "functions have a name twice; rename one")
        if kind == "required" and not names:
            raise InvalidRequest("tool_choice", kind, "needs tools; send at least one")
        if kind == "function" and self.function not in names:
            raise InvalidRequest("tool_choice", self.function[:64], "is no function of tools; name one of them")
        if self.forces_calls and super().output_form is not None:
            fix = "cannot be combined with another form of the output (response_format, structured_outputs, text.format); send one of them"
            raise InvalidRequest("tool_choice", kind, fix)
        return self

    @property
    def function(self) -> str:
        """The function that `tool_choice` names; "" if it names none."""
        named = self.tool_choice.function
        return named.name if named else ""

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice.type == "none" else self.tools

    @property
    def forces_calls(self) -> bool:
        """The whole output is calls."""
        return bool(self.tools) and self.tool_choice.type in ("required", "function")

    def call_format(self, known: CallFormat | Tools) -> CallFormat | None:
        """The format of calls in the answer; None if there are no calls.

        known: that of the model. UnsupportedParameter if the model's template has no tools, or a format that is not known here."""
        if not self.offered:
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
        """The form of an output that may have calls in this format. marks: as in `grammar_of_choice`. UnsupportedParameter if calls
        cannot be kept valid, or cannot be told from the form that the request asks for."""
        own = self.output_form
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
        except (TypeError, ValueError):  # of the text that `structured_outputs.json` may be
            raise InvalidRequest("structured_outputs.json", "a text", "is no JSON object") from None
        return structure_of("tools", Form.GRAMMAR, text)

    @property
    def output_form(self) -> Structure | None:
        """Calls that the request forces, or another form that it asks for."""
        if not self.forces_calls:
            return super().output_form
        functions = [tool.function for tool in self.tools]
        if self.function:
            (parameters,) = [function.parameters for function in functions if function.name == self.function]
            schema = parameters or {"type": "object"}
        else:
            schema = forced_schema(functions, parallel=self.parallel_tool_calls)
        return structure_of("tools", Form.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))

    def chat(self, messages: list[Message]) -> Chat:
        chat = super().chat(messages)
        if not self.offered:
            return chat
        tools = [tool.model_dump(exclude_defaults=True) for tool in self.offered]
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
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("messages", "given", "beside prompt; send one of them")
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


def _header_number(headers: Mapping[str, str], name: str, *, least: int, fix: str) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or len(value) > MAX_DIGITS or int(value) < least:
        raise InvalidRequest(name, value[:16], fix)
    return int(value)
