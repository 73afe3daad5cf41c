"""Answers of the HTTP API: the fields that clients may rely on, for `/openapi.json`. More fields come where a request asks for them.

Answers with tokens are plain dicts (`gateway.answers`), so that no token waits for validation.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from gateway.requests import VERIFICATIONS
from gateway.schemas import Count
from rootward.core.requests import FinishReason
from rootward.values import ModelInfo


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
    reasoning_content: str = ""  # thoughts in tags, if the gateway separates them
    reasoning: str = ""  # the same
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
    reasoning: str = ""
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
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "rootward"
    root: str
    parent: None = None
    max_model_len: Count
    rootward: ModelExtras

    @classmethod
    def of(cls, name: str, model: ModelInfo, created: int) -> Self:
        """name: the one that clients use; created: seconds since 1970."""
        extras = ModelExtras(tree=model.supports_trees, verification=list(VERIFICATIONS))
        return cls(id=name, created=created, root=model.name, max_model_len=model.max_positions, rootward=extras)


class ModelList(Object):
    object: Literal["list"] = "list"
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


# -- /v1/responses


class OutputItem(Object):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(Object):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count


class Response(Object):
    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputItem]
    store: bool
    usage: ResponseUsage | None


class ResponseEvent(Object):
    """An event of a stream of /v1/responses."""

    type: str
    sequence_number: Count


class DeletedResponse(Object):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
