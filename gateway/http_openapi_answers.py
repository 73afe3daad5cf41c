"""The answers in the OpenAPI description. Clients may rely on what is required here; more fields come where they are asked for."""

from __future__ import annotations

from rootward.core.requests import FinishReason

Schema = dict[str, object]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}


def completion() -> Schema:
    return _generated("text_completion", {"text": TEXT, "logprobs": _or_null(_text_logprobs())})


def chat() -> Schema:
    message = answer(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"})
    return _generated("chat.completion", {"message": message, "logprobs": _or_null(_chat_logprobs())})


def chat_chunk() -> Schema:
    """The data of an event of a stream. (Completions come in their whole form.)"""
    delta: Schema = {"type": "object", "properties": {"role": {"const": "assistant"}, "content": TEXT}}
    return _generated("chat.completion.chunk", {"delta": delta, "logprobs": _or_null(_chat_logprobs())})


def tokens() -> Schema:
    texts = _or_null({"type": "array", "items": TEXT})
    return answer(tokens={"type": "array", "items": COUNT}, count=COUNT, max_model_len=COUNT, token_strs=texts)


def text() -> Schema:
    return answer(prompt=TEXT)


def models() -> Schema:
    return answer(object={"const": "list"}, data={"type": "array", "items": model(), "minItems": 1})


def model() -> Schema:
    about = answer(tree=FLAG, verification={"type": "array", "items": TEXT})
    named: dict[str, Schema] = {
        "id": TEXT,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": {"type": "null"},
        "object": {"const": "model"},
    }
    return answer(**named, created=COUNT, max_model_len=COUNT, rootward=about)


def load() -> Schema:
    counts = {name: COUNT for name in ("server_load", "num_running", "num_waiting", "max_num_seqs")}
    return answer(**counts, draining=FLAG)


def version() -> Schema:
    return answer(version=TEXT)


def answer(**properties: Schema) -> Schema:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _generated(kind: str, choice: dict[str, Schema]) -> Schema:
    ends: dict[str, Schema] = {
        "finish_reason": {"enum": [None, *(r.value for r in FinishReason)]},
        "stop_reason": {"type": ["string", "integer", "null"]},
    }
    named: dict[str, Schema] = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    made = named | {"choices": _list(answer(index=COUNT, **choice, **ends)), "system_fingerprint": TEXT}
    usage = _or_null(_usage())  # on the last chunk of a stream, where it is asked for
    return {"type": "object", "properties": {**made, "usage": usage}, "required": list(made)}


def _usage() -> Schema:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return answer(
        **{name: COUNT for name in names},
        prompt_tokens_details=answer(cached_tokens=COUNT),
        completion_tokens_details=answer(reasoning_tokens=COUNT),
    )


def _text_logprobs() -> Schema:
    number: Schema = {"type": ["number", "null"]}
    by_text = _or_null({"type": "object", "additionalProperties": {"type": "number"}})
    return answer(
        tokens=_list(TEXT), token_logprobs=_list(number), top_logprobs=_list(by_text), text_offset=_list(COUNT)
    )


def _chat_logprobs() -> Schema:
    token: dict[str, Schema] = {
        "token": TEXT,
        "logprob": {"type": "number", "maximum": 0},
        "bytes": _or_null(_list(COUNT)),
    }
    return answer(content=_list(answer(**token, top_logprobs=_list(answer(**token)))), refusal={"type": "null"})


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
