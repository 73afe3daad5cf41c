"""`response_format` (OpenAI) and `structured_outputs` (vLLM) → the form of the output."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gateway.http_values import short, string
from rootward.core.requests import Form, Structure
from rootward.errors import InvalidRequest, UnsupportedParameter

_OUTPUTS = {"json": Form.JSON_SCHEMA, "regex": Form.REGEX, "grammar": Form.GRAMMAR}


def structure(body: Mapping[str, object]) -> Structure | None:
    """None where nothing is asked for. Both at once are refused."""
    formats, outputs = body.get("response_format"), body.get("structured_outputs")
    wanted = None if formats is None else _response_format(formats)
    if outputs is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest("structured_outputs", "given", "beside response_format; send one of them")
    return _structured_outputs(outputs)


def _response_format(value: object) -> Structure | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        fix = "is unknown; use an object whose type is 'text', 'json_object' or 'json_schema'"
        raise InvalidRequest("response_format", short(kind or value), fix)
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure(Form.JSON_OBJECT)
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format", short(schema), "has no json_schema.schema; send a schema object")
    return _schema(schema)


def _structured_outputs(value: object) -> Structure:
    """One of json, json_object, regex, choice and grammar."""
    given = {k: v for k, v in value.items() if v is not None and v is not False} if isinstance(value, dict) else {}
    if len(given) != 1:
        fix = "is not one form; use an object with json, json_object, regex, choice or grammar"
        raise InvalidRequest("structured_outputs", short(value) if not given else len(given), fix)
    ((name, text),) = given.items()
    if name == "json_object":
        return Structure(Form.JSON_OBJECT)
    if name == "choice":
        return Structure(Form.GRAMMAR, _choices(text))
    if name == "json" and isinstance(text, dict):
        return _schema(text)
    if name not in _OUTPUTS:
        raise UnsupportedParameter(f"structured_outputs.{name[:32]}", short(text), "is not supported; leave it out")
    return Structure(_OUTPUTS[name], string(f"structured_outputs.{name}", text))


def _schema(schema: object) -> Structure:
    return Structure(Form.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def _choices(value: object) -> str:
    """A grammar of these texts."""
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise InvalidRequest("structured_outputs.choice", short(value), "is not a list of texts")
    return "start: " + " | ".join(json.dumps(v, ensure_ascii=False) for v in value)
