"""The OpenAPI description of the HTTP face, for client generators, documentation viewers and fuzzers (`GET /openapi.json`)."""

from __future__ import annotations

import rootward
from gateway import http_openapi_answers as answers
from gateway.http_fields import MAX_STREAM_INTERVAL
from gateway.http_messages import ROLES
from gateway.http_requests import MAX_TOP_LOGPROBS
from rootward.core.requests import MAX_LOGPROBS, SpeculationMode

Schema = dict[str, object]


def description() -> Schema:
    """OpenAPI 3.1, as a JSON value."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rootward", "version": rootward.__version__, "description": "OpenAI-compatible; see parameters.md."},
        "paths": {
            "/v1/completions": {"post": _post("completions", _completion(), answers.completion(), events="Completion")},
            "/v1/chat/completions": {"post": _post("chatCompletions", _chat(), answers.chat(), events="ChatChunk")},
            "/v1/models": {"get": _get("listModels", answers.models())},
            "/v1/models/{model}": {"get": _get("getModel", answers.model(), "model")},
            "/tokenize": {"post": _post("tokenize", _tokenize(), answers.tokens())},
            "/detokenize": {"post": _post("detokenize", _detokenize(), answers.text())},
            "/load": {"get": _get("load", answers.load())},
            "/version": {"get": _get("version", answers.version())},
        },
        "components": {"schemas": {"Error": _error(), "Completion": answers.completion(), "ChatChunk": answers.chat_chunk()}},
    }  # fmt: skip


def _shared() -> Schema:
    """Fields of both generating endpoints."""
    return {
        "model": _text(),
        "stream": _flag(),
        "stream_options": _object({"include_usage": _flag(), "continuous_usage_stats": _flag()}),
        "stream_interval": _whole(0, MAX_STREAM_INTERVAL),
        "max_tokens": _whole(0),
        "max_completion_tokens": _whole(0),
        "n": _whole(1, 128),
        "temperature": _number(0, 100),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _whole(-1),
        "min_p": _number(0, 1),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100), "propertyNames": {"pattern": "^[0-9]+$"}},
        "allowed_token_ids": _ids(),
        "bad_words": _texts(),
        "seed": _whole(-(2**63), 2**64 - 1),
        "stop": {"anyOf": [_text(), _texts()]},
        "stop_token_ids": _ids(),
        "include_stop_str_in_output": _flag(),
        "ignore_eos": _flag(),
        "min_tokens": _whole(0),
        "skip_special_tokens": _flag(),
        "return_token_ids": _flag(),
        "truncate_prompt_tokens": _whole(-1),
        "prompt_logprobs": _whole(0, MAX_LOGPROBS),
        "prediction": _object({"type": {"const": "content"}, "content": _text()}, "type", "content"),
        "response_format": _response_format(),
        "structured_outputs": {"type": "object", "minProperties": 1, "maxProperties": 1, "properties": _forms()},
        "speculation": {"anyOf": [_flag(), {"enum": [m.value for m in SpeculationMode]}, _speculation()]},
        "cache_salt": _text(),
        "priority": _whole(-(2**31), 2**31 - 1),
        "session_id": _text(),
        "request_id": _text(),
        "user": _text(),
    }  # fmt: skip


def _completion() -> Schema:
    prompt = {"anyOf": [_text(), _ids(), _texts(), {"type": "array", "items": _ids(), "minItems": 1}]}
    own = {"prompt": prompt, "echo": _flag(), "logprobs": _whole(0, MAX_LOGPROBS), "add_special_tokens": _flag()}
    return _object(own | _shared(), "prompt")


def _chat() -> Schema:
    own = {
        "messages": _messages(),
        "logprobs": _flag(),
        "top_logprobs": _whole(0, MAX_TOP_LOGPROBS),
        "add_generation_prompt": _flag(),
        "continue_final_message": _flag(),
        "chat_template_kwargs": {"type": "object"},
    }
    return _object(own | _shared(), "messages")


def _tokenize() -> Schema:
    more: Schema = {"model": _text(), "add_special_tokens": _flag(), "return_token_strs": _flag()}
    return {
        "anyOf": [_object({"prompt": _text()} | more, "prompt"), _object({"messages": _messages()} | more, "messages")]
    }


def _detokenize() -> Schema:
    return _object({"tokens": _ids(), "model": _text(), "skip_special_tokens": _flag()}, "tokens")


def _messages() -> Schema:
    part = _object({"type": {"const": "text"}, "text": _text()}, "type", "text")
    content = {"anyOf": [_text(), {"type": "array", "items": part, "minItems": 1}]}
    message = _object({"role": {"enum": list(ROLES)}, "content": content, "name": _text()}, "role", "content")
    return {"type": "array", "items": message, "minItems": 1}


def _response_format() -> Schema:
    schema = _object({"name": _text(), "schema": {"type": "object"}}, "schema")
    return {
        "anyOf": [
            _object({"type": {"enum": ["text", "json_object"]}}, "type"),
            _object({"type": {"const": "json_schema"}, "json_schema": schema}, "type", "json_schema"),
        ]
    }


def _forms() -> Schema:
    json_schema = {"anyOf": [{"type": "object"}, _text()]}
    return {"json": json_schema, "json_object": _flag(), "regex": _text(), "grammar": _text(), "choice": _texts()}


def _speculation() -> Schema:
    size = _whole(1, 1024)
    rules = {"enum": ["traversal", "coupled", "token"]}
    own: Schema = {"mode": {"enum": [m.value for m in SpeculationMode]}, "verification": rules}
    return _object(own | {"max_depth": size, "topk": size, "num_draft_tokens": size, "drafter": _text()})


def _error() -> Schema:
    nullable = {"type": ["string", "null"]}
    error = _object(
        {"message": _text(), "type": _text(), "param": nullable, "code": _text()}, "message", "type", "param", "code"
    )
    return _object({"error": error}, "error")


def _post(name: str, body: Schema, answer: Schema, *, events: str = "") -> Schema:
    """events: the schema of what a stream's events carry, where there may be a stream."""
    content = {"application/json": {"schema": body}}
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": content},
        "responses": _responses(answer, events),
    }


def _get(name: str, answer: Schema, *path: str) -> Schema:
    parameters = [
        {"name": p, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for p in path
    ]
    return {"operationId": name, "parameters": parameters, "responses": _responses(answer)}


def _responses(answer: Schema, events: str = "") -> Schema:
    content: Schema = {"application/json": {"schema": answer}}
    if events:
        told = f"Server-sent events: #/components/schemas/{events} each, then [DONE]."
        content["text/event-stream"] = {"schema": {"type": "string", "description": told}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "A refusal or a failure.", "content": error},
    }


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text() -> Schema:
    return {"type": "string"}


def _texts() -> Schema:
    return {"type": "array", "items": _text(), "minItems": 1}


def _flag() -> Schema:
    return {"type": "boolean"}


def _ids() -> Schema:
    return {"type": "array", "items": _whole(0, 2**32 - 1), "minItems": 1}


def _whole(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}
