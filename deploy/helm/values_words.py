"""The words in which values of the chart are described: each is a JSON schema with a meaning and a default."""

from __future__ import annotations

from typing import Any

from rootward.settings import ServiceSettings

Schema = dict[str, Any]

# What the chart computes itself; setting it by hand would contradict the rest of the manifest.
OWN = {
    "admin_listen",
    "advertise",
    "api_keys",
    "config",
    "drafters",
    "http_listen",
    "listen",
    "log_json",
    "log_level",
    "master_addr",
    "master_port",
    "max_num_batched_tokens",
    "model",
    "models",
    "nnodes",
    "node_rank",
    "pool",
    "public_tls_certificate",
    "public_tls_key",
    "redis_prefix",
    "redis_url",
    "scaler_listen",
    "served_model_name",
    "shutdown_timeout_s",
    "tls_authority",
    "tls_certificate",
    "tls_key",
    "tls_peers",
    "tls_server_name",
    "verifiers",
}


def text(meaning: str, default: str = "", **more: Any) -> Schema:
    return {"type": "string", "description": meaning, "default": default, **more}


def whole(meaning: str, default: int, least: int = 0, **more: Any) -> Schema:
    return {"type": "integer", "description": meaning, "default": default, "minimum": least, **more}


def share(meaning: str, default: float) -> Schema:
    limits = {"exclusiveMinimum": 0, "maximum": 1}
    return {"type": "number", "description": meaning, "default": default, **limits}


def flag(meaning: str, default: bool) -> Schema:
    return {"type": "boolean", "description": meaning, "default": default}


def choice(meaning: str, default: str, *others: str) -> Schema:
    return {"type": "string", "description": meaning, "default": default, "enum": [default, *others]}


def free(meaning: str, default: dict[str, Any] | None = None) -> Schema:
    """A mapping of Kubernetes that is passed on as it is."""
    return {"type": "object", "description": meaning, "default": default or {}}


def listed(meaning: str, items: str = "object", default: list[Any] | None = None) -> Schema:
    return {"type": "array", "description": meaning, "default": default or [], "items": {"type": items}}


def group(meaning: str, **properties: Schema) -> Schema:
    return {"type": "object", "description": meaning, "additionalProperties": False, "properties": properties}


def settings_of(service: type[ServiceSettings]) -> Schema:
    """The settings a user may give, as their class describes them."""
    known = service.model_json_schema()
    definitions = known.get("$defs", {})
    properties = {
        name: _inlined(spec, definitions) for name, spec in sorted(known["properties"].items()) if name not in OWN
    }
    title = service.__name__.removesuffix("Settings").lower()
    meaning = f"Settings of the {title}; what is not given keeps the service's own default."
    return {"type": "object", "description": meaning, "additionalProperties": False, "properties": properties}


def _inlined(spec: Schema, definitions: dict[str, Schema]) -> Schema:
    if "$ref" in spec:
        spec = {**definitions[spec["$ref"].rpartition("/")[2]], **{k: v for k, v in spec.items() if k != "$ref"}}
    if "anyOf" in spec:
        spec = {**spec, "anyOf": [_inlined(option, definitions) for option in spec["anyOf"]]}
    return {key: value for key, value in spec.items() if key != "title"}
