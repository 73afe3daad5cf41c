"""OpenAI's Responses API: its bodies as pydantic models, translated into requests of the chat endpoint.

A response is generated as a chat (`schemas.ChatRequest`). The items of its conversation become messages: a function call is added to the
assistant message before it, reasoning to the one after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from gateway.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    WHOLE,
    Body,
    CalledFunction,
    CallInMessage,
    ChatRequest,
    CommonFields,
    FunctionTool,
    JsonObject,
    JsonSchema,
    JsonText,
    Message,
    NamedFunction,
    Part,
    ResponseFormat,
    Tool,
    ToolChoice,
    arguments_within_limits,
    at_most,
    check_belongs,
    choice_of,
    only,
    refused,
    text_of,
)
from rootward.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"  # the entry of `include` that asks for them


# -- Items of a conversation --------------------------------------------------------------------------------------------


class InputPart(Part):
    """A text in a message. Items of earlier answers may be sent back unchanged."""

    harmless: ClassVar = {"annotations": ([],)}

    type: Annotated[str, only("input_text", "output_text", "text", fix="this model reads text alone")]
    logprobs: list[Any] = Field(default=[])  # of an earlier answer


Parts = Annotated[list[InputPart], Field(fail_fast=True)]


class Item(Body):
    """Fields that all items may have and that change nothing."""

    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"


class MessageItem(Item):
    type: Annotated[
        str,
        only("message", fix="use 'message', 'function_call', 'function_call_output' or 'reasoning'"),
        WithJsonSchema({"const": "message"}),
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: JsonText


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningPart(Part):
    type: Literal["reasoning_text", "summary_text"]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field(default=[])
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field(default=[])


def _item_tag(value: object) -> str:
    """The tag is in brackets, which keeps it out of the paths of errors."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind}]" if kind in ("function_call", "function_call_output", "reasoning") else "[message]"


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(_item_tag),
]
Items = Annotated[
    list[InputItem],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(arguments_within_limits),
    at_most(MAX_MESSAGES, "items"),
]


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """The chat messages of these items. Successive items of the assistant make one message."""
    messages: list[dict[str, Any]] = []
    thoughts = ""  # of the next message of the assistant
    open_answer = False  # the last message is of the assistant and takes calls
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts += text_of(item.content or item.summary)
            open_answer = False
        elif isinstance(item, CallOutputItem):
            messages.append(
                {"role": "tool", "content": text_of(item.output, between="\n"), "tool_call_id": item.call_id}
            )
            open_answer = False
        elif isinstance(item, CallItem):
            if not open_answer:
                messages.append({"role": "assistant", "reasoning_content": thoughts})
                thoughts, open_answer = "", True
            function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)  # checked by `CallItem`
            messages[-1].setdefault("tool_calls", []).append(CallInMessage(id=item.call_id, function=function))
        elif open_answer and item.role == "assistant" and "tool_calls" in messages[-1]:  # text after calls
            messages[-1]["content"] = messages[-1].get("content", "") + text_of(item.content, between="\n")
        else:
            open_answer = item.role == "assistant"
            reasoning = thoughts if open_answer else ""
            text = text_of(item.content, between="\n")
            messages.append({"role": item.role, "content": text, "reasoning_content": reasoning})
            thoughts = ""
    return [Message(**message) for message in messages]


_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


def items_of(output: Iterable[Mapping[str, object]]) -> list[InputItem]:
    """The output of an answer as items of a conversation. Calls that are nested too deeply are left out: no template could show them."""
    items = []
    for item in output:
        with suppress(ValidationError):
            items.append(_ITEM.validate_python(item))
    return items


# -- The request --------------------------------------------------------------------------------------------------------


class ResponseTool(FunctionTool):
    """A function; in a chat it is a member of the tool."""

    type: Annotated[
        str, only("function", fix="use functions, which the client calls"), WithJsonSchema({"const": "function"})
    ]


class ResponseToolChoice(Body):
    type: Literal["none", "auto", "required", "function"]
    name: str = ""

    @model_validator(mode="after")
    def _names_what_it_says(self) -> ResponseToolChoice:
        check_belongs("name", self.name, to="function", kind=self.type)
        return self


class TextFormat(Body):
    """A form of the output, as `response_format` of a chat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    strict: bool = False
    schema_: JsonObject | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise refused("has no schema; send a schema object")
        check_belongs("schema", self.schema_ is not None, to="json_schema", kind=self.type)
        return self

    @property
    def response_format(self) -> ResponseFormat:
        schema = None if self.schema_ is None else JsonSchema(name=self.name, schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema, schema=None)


class TextOptions(Body):
    harmless: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat(schema=None)


class ReasoningOptions(Body):
    """Accepted without an effect: the gateway's settings separate thoughts, and `chat_template_kwargs` control how much a model thinks."""

    harmless: ClassVar = {"effort": ("none",)}


class ResponseStreamOptions(Body):
    harmless: ClassVar = {"include_obfuscation": (False, True), "include_usage": (True,)}  # the usage is always there


class ResponseRequest(CommonFields):
    """POST /v1/responses"""

    harmless: ClassVar = {
        "background": (False,),
        "prompt_cache_retention": ("in_memory", "24h"),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
    }

    input: str | Items
    instructions: str = ""
    previous_response_id: str = ""
    store: bool = True
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default=[])
    tool_choice: Annotated[ResponseToolChoice, choice_of(ResponseToolChoice)] = ResponseToolChoice(type="auto")
    parallel_tool_calls: bool = True
    include: Annotated[
        list[Annotated[str, only(LOGPROBS, fix=f"use {LOGPROBS!r}"), WithJsonSchema({"const": LOGPROBS})]],
        Field(max_length=16, fail_fast=True),
    ] = Field(default=[])
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] = 0
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(16, "entries")
    ] = Field(default={})
    client_metadata: dict[str, Any] = Field(default={})  # a label of Codex
    chat_template_kwargs: JsonObject = Field(default={})

    @property
    def messages(self) -> list[Message]:
        """The messages of `input`."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        return messages_of(self.input)

    def chat(self, messages: list[Message]) -> ChatRequest:
        """The chat that answers these messages, under the instructions. InvalidRequest names the field that cannot be served."""
        if self.instructions:
            messages = [Message(role="system", content=self.instructions), *messages]
        if not 1 <= len(messages) <= MAX_MESSAGES:
            fix = f"messages, with those of the responses before it, are not 1 to {MAX_MESSAGES}"
            raise InvalidRequest("input", len(messages), fix)
        if self.top_logprobs and LOGPROBS not in self.include:
            fix = f"is given without {LOGPROBS!r} in include; send both"
            raise InvalidRequest("top_logprobs", self.top_logprobs, fix)
        choice = self.tool_choice
        named = NamedFunction(name=choice.name) if choice.type == "function" else None
        return ChatRequest(
            messages=messages,
            **{name: getattr(self, name) for name in CommonFields.model_fields if name in self.model_fields_set},
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text.format.response_format,
            tools=[Tool(type="function", function=tool) for tool in self.tools],
            tool_choice=ToolChoice(type=choice.type, function=named),
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=LOGPROBS in self.include,
            top_logprobs=self.top_logprobs,
            chat_template_kwargs=self.chat_template_kwargs,
        )
