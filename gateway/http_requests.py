"""The bodies of POST /v1/completions and POST /v1/chat/completions → GenerateRequest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.http_fields import (
    UNSUPPORTED,
    Body,
    Harmless,
    json_object,
    max_tokens,
    num_logprobs,
    refuse,
    shared,
    stream_interval,
    stream_options,
)
from gateway.http_messages import conversation
from gateway.http_values import boolean, integer, one, short, token_ids
from gateway.planning import refusing
from gateway.requests import GenerateRequest
from rootward.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it
MAX_TOP_LOGPROBS = 20

Prompt = str | tuple[int, ...]

_NOT_IN_COMPLETIONS: Harmless = {**UNSUPPORTED, "suffix": ("",)}
_NOT_IN_CHAT: Harmless = {
    **UNSUPPORTED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A generation as asked for over HTTP: what to generate, and how to tell of it."""

    request: GenerateRequest
    prompts: tuple[Prompt, ...] = ()  # of /v1/completions, which takes several
    stream: bool = False
    include_usage: bool = False  # one more chunk with the usage
    continuous_usage: bool = False  # usage so far in every chunk
    stream_interval: int = 0  # fewest tokens of a chunk
    return_token_ids: bool = False
    prompt_logprobs: bool = False
    report_speculation: bool = False  # the request speaks of speculation, so the answer does
    echo: bool = False  # the prompt in front of the text
    only_echo: bool = False  # and no text


Parse = Callable[[bytes, Mapping[str, str]], Wanted]


def parse_completion(data: bytes, headers: Mapping[str, str]) -> Wanted:
    """InvalidRequest or UnsupportedParameter, naming the parameter, for what cannot be served."""
    body = json_object(data)
    refuse(body, _NOT_IN_COMPLETIONS)
    prompts, echo = _prompts(body.get("prompt")), one(body, "echo", boolean, False)
    with refusing():
        logprobs, common = num_logprobs("logprobs", body), shared(body, headers)
    if echo and common["truncate_prompt"] is not None:
        raise InvalidRequest("echo", True, "cannot be combined with truncate_prompt_tokens; send one of them")
    if echo and logprobs is not None and common["prompt_logprobs"] is None:
        common["prompt_logprobs"] = logprobs  # the prompt's tokens are told like the text's
    wish = max_tokens(body)
    most = DEFAULT_MAX_TOKENS if wish is None else wish
    only_echo = echo and most == 0
    with refusing():
        request = GenerateRequest(
            prompt=prompts[0],
            max_tokens=1 if only_echo else most,
            logprobs=logprobs,
            **common,
        )
    return _wanted(body, request, prompts, echo, only_echo)


def parse_chat(data: bytes, headers: Mapping[str, str]) -> Wanted:
    """The same for a conversation."""
    body = json_object(data)
    refuse(body, _NOT_IN_CHAT)
    with refusing():
        request = GenerateRequest(
            prompt=conversation(body),
            max_tokens=max_tokens(body),
            logprobs=_chat_logprobs(body),
            **shared(body, headers),
        )
    return _wanted(body, request)


def _wanted(
    body: Body, request: GenerateRequest, prompts: tuple[Prompt, ...] = (), echo: bool = False, only_echo: bool = False
) -> Wanted:
    stream = one(body, "stream", boolean, False)
    include_usage, continuous_usage = stream_options(body, stream)
    if request.trees and not stream:
        raise InvalidRequest("return_trees", True, "without 'stream': true; trees are told as they are verified")
    return Wanted(
        request,
        prompts,
        stream,
        include_usage,
        continuous_usage,
        stream_interval(body),
        return_token_ids=one(body, "return_token_ids", boolean, False),
        prompt_logprobs=num_logprobs("prompt_logprobs", body) is not None,
        report_speculation=body.get("speculation") is not None,
        echo=echo,
        only_echo=only_echo,
    )


def _prompts(value: object) -> tuple[Prompt, ...]:
    """A text, a list of token ids, or a list of texts or of lists of token ids."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return tuple(_prompt(v) for v in value)
    return (_prompt(value),)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return token_ids("prompt", value)
    raise InvalidRequest("prompt", short(value), "is missing or empty; send a string or a list of token ids")


def _chat_logprobs(body: Body) -> int | None:
    most = one(body, "top_logprobs", integer, 0)
    if not 0 <= most <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("top_logprobs", most, f"is outside [0, {MAX_TOP_LOGPROBS}]")
    if one(body, "logprobs", boolean, False):
        return most
    if most:
        raise InvalidRequest("top_logprobs", most, "is given without 'logprobs': true; send both")
    return None
