"""Settings of the gateway: flags, `ROOTWARD_*` variables or a file, see `rootward.settings`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.admission import MAX_HELD_LOGPROBS
from gateway.http_guard import LOCAL_HOSTS
from gateway.session_store import Rate
from gateway.stored_responses import LIFETIME_S, MAX_BYTES, MAX_RESPONSES
from gateway.tools import CallFormat
from rootward.addresses import is_loopback
from rootward.discovery.sources import Source, SourceList, parse_sources
from rootward.settings import (
    CommaSeparated,
    ListenAddress,
    OptionalListenAddress,
    ProcessSettings,
    ServiceSettings,
    TargetSpec,
)
from rootward.wire.channel import MAX_REQUEST_BYTES
from rootward.wire.tls import Certificates, ServerTls

ToolCallFormat = Literal["auto", "hermes", "mistral", "json"]


class ServedModel(BaseModel):
    """One model of a gateway, where several are served."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: TargetSpec = Field(min_length=1, description="folder or hub name of the target model, for its tokenizer")
    verifiers: SourceList = Field(min_length=1, description="as the setting of this name")
    served_model_name: str = Field("", description="name clients use (default: the last part of model)")
    tool_call_format: ToolCallFormat = Field("auto", description="in place of the setting of this name")

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of verifier addresses. In the registry verifiers are under the name of the model that they serve."""
        return parse_sources([f"redis:{self.name}" if entry == "redis:" else entry for entry in self.verifiers])

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or Path(self.model).name or self.model


class GatewaySettings(ProcessSettings):
    """Rootward gateway: serves clients over gRPC and OpenAI-compatible HTTP, in front of one or more verifiers."""

    model: TargetSpec = Field(
        "", description="folder or hub name of the target model, for its tokenizer; demo, the shipped one; or tabular:…"
    )
    verifiers: SourceList = Field(
        default=["127.0.0.1:50052"],
        min_length=1,
        description="host:port, dns:name:port, redis: (the registry) or kubernetes:service, with commas between",
    )
    served_model_name: str = Field("", description="name clients use (default: the last part of --model)")
    models: list[ServedModel] = Field(
        default=[],
        description="in place of model, verifiers and served_model_name: a list of these, for several models; best in --config",
    )
    listen: ListenAddress = Field("127.0.0.1:50051", description="gRPC address; port 0 takes a free one")
    http_listen: ListenAddress = Field("127.0.0.1:8000", description="HTTP address; port 0 takes a free one")
    http_allowed_origins: CommaSeparated = Field(
        default=[],
        description="web pages whose scripts may call the HTTP API, as https://chat.example, with commas between; * for all",
    )
    metrics_compat: Literal["none", "vllm"] = Field(
        "none", description="export metrics of the same meaning under vLLM's names as well"
    )
    scaler_listen: OptionalListenAddress = Field(
        "", description="gRPC address of KEDA's external scaler; needs redis_url (default: none)"
    )
    redis_url: str = Field(
        "", description="redis://host:port/0 for leases and sessions (default: this process's memory)"
    )
    api_keys: Path | None = Field(None, description="YAML file of API keys, see 'rootward keys' (default: open to all)")
    public_tls_certificate: Path | None = Field(
        None, description="PEM file that clients see, where the one of tls_certificate is for the other roles alone"
    )
    public_tls_key: Path | None = Field(None, description="PEM file of its key")
    add_special_tokens: bool = Field(False, description="put the tokenizer's special tokens around text prompts")
    special_tokens_in_messages: bool = Field(
        False, description="texts of special tokens in messages become control tokens (default: they stay text)"
    )
    http_sampling_defaults: Literal["openai", "model"] = Field(
        "openai",
        description="temperature, top_p, top_k, min_p and repetition_penalty of HTTP requests that give none: OpenAI's, or those of the "
        "model's generation_config.json, as vLLM takes them",
    )
    reasoning_content: bool = Field(
        False,
        description="text that chat models write between <think> and </think> first is returned apart, as reasoning_content",
    )
    tool_call_format: ToolCallFormat = Field(
        "auto",
        description="how the model writes tool calls: hermes (<tool_call>), mistral ([TOOL_CALLS]), json (Llama 3) "
        "or auto (as its chat template does)",
    )
    response_lifetime_s: float = Field(
        LIFETIME_S, ge=0, description="how long answers of /v1/responses are stored; 0: not at all"
    )
    max_stored_responses: int = Field(MAX_RESPONSES, ge=1, description="of a tenant at one time; the oldest ones go")
    max_stored_response_bytes: int = Field(
        MAX_BYTES, ge=1, description="largest answer of /v1/responses that is stored, with its conversation"
    )
    max_request_bytes: int = Field(
        MAX_REQUEST_BYTES, ge=1 << 12, le=1 << 30, description="largest gRPC message or HTTP body of a request"
    )
    max_bytes_in_flight: int = Field(
        256 << 20, ge=1, description="bytes of all gRPC messages and HTTP bodies whose requests are not answered yet"
    )
    max_http_connections: int = Field(1024, ge=1, description="HTTP connections at one time")
    max_num_seqs: int = Field(256, ge=1, description="requests at verifiers at one time")
    max_num_queued_reqs: int = Field(256, ge=0, description="requests that may wait for a place")
    max_num_queued_tokens: int = Field(1 << 20, ge=1, description="prompt tokens that may wait for a place")
    max_held_logprobs: int = Field(
        MAX_HELD_LOGPROBS,
        ge=1,
        description="log-probabilities that answers in progress hold; each takes about 130 bytes",
    )
    max_prompt_tokens: int = Field(0, ge=0, description="longest prompt of a request (default: the context)")
    max_prompt_characters: int = Field(
        0, ge=0, description="longest prompt in characters (default: 16 for every token of the context)"
    )
    max_choices: int = Field(16, ge=1, le=128, description="most choices (n) of one request")
    max_output_tokens: int = Field(0, ge=0, description="most tokens that a request may ask for (default: the context)")
    tenant_tokens_per_minute: int = Field(
        0, ge=0, description="prompt and output tokens of a tenant (default: no limit)"
    )
    tenant_burst_tokens: int = Field(0, ge=0, description="most of them at once (default: those of a minute)")
    request_timeout_s: float = Field(600.0, gt=0, description="longest time of a request")
    redispatch_wait_s: float = Field(30.0, ge=0, description="how long a running request waits for another verifier")
    shutdown_timeout_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for running requests")

    @field_validator("http_allowed_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/?#]+", origin):
                raise ValueError(f"{origin!r} is no origin; write scheme and host, as https://chat.example, or *")
        return origins

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.scaler_listen and not self.redis_url:
            raise ValueError("scaler_listen needs redis_url: demand is read from the registry of workers")
        if bool(self.public_tls_certificate) != bool(self.public_tls_key):
            raise ValueError("give public_tls_certificate and public_tls_key together, or none of them")
        if self.public_tls_certificate and self.certificates is None:
            raise ValueError("public_tls_certificate needs tls_certificate, tls_key and tls_authority")
        if self.model and self.models:
            raise ValueError("models: cannot stand beside model; put that one into the list")
        if not self.model and not self.models:
            raise ValueError(
                "model: is required; give --model, ROOTWARD_MODEL or a line in --config, or a list of models"
            )
        names = [served.name for served in self.served]
        if len(set(names)) < len(names):
            raise ValueError(f"models: two have the same name in {names}; give each its served_model_name")
        return self

    @property
    def public_tls(self) -> ServerTls | None:
        """TLS for clients, who need a certificate only if tls_peers is set."""
        files = self.certificates
        if files is None:
            return None
        if self.public_tls_certificate is not None and self.public_tls_key is not None:
            files = Certificates(self.public_tls_certificate, self.public_tls_key, files.authority)
        return ServerTls(files, mutual=bool(self.tls_peers), peers=tuple(self.tls_peers))

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """All models."""
        if self.models:
            return tuple(self.models)
        names = ("model", "verifiers", "served_model_name", "tool_call_format")
        return (ServedModel(**{name: getattr(self, name) for name in names}),)

    @property
    def call_formats(self) -> dict[str, CallFormat]:
        """Formats of tool calls by the names of models, without models whose chat template shows it."""
        own = {served.name: served.tool_call_format for served in self.served}
        chosen = {name: self.tool_call_format if form == "auto" else form for name, form in own.items()}
        return {name: CallFormat[form.upper()] for name, form in chosen.items() if form != "auto"}

    @property
    def http_hosts(self) -> frozenset[str] | None:
        """The only host names that requests may have, for a server without keys on loopback; None = any."""
        if self.api_keys is not None or not is_loopback(self.http_listen):
            return None
        return LOCAL_HOSTS | {self.http_listen.rpartition(":")[0].strip("[]")}

    @property
    def tenant_rate(self) -> Rate | None:
        per_minute = self.tenant_tokens_per_minute
        return Rate(per_minute / 60, self.tenant_burst_tokens or per_minute) if per_minute else None


class LocalSettings(ServiceSettings):
    """Rootward on one machine: Redis, drafter, verifier and gateway as processes on loopback. Default: SmolLM2 with its draft head, if
    `make demo` has fetched it, else the shipped pair."""

    model: str = Field(
        "",
        description="target model: folder, hub name, GGUF file, tabular:… or demo, the shipped pair "
        "(default: SmolLM2-135M-Instruct if `make demo` has fetched it and no option of drafters is given, else demo)",
    )
    draft_model: str = Field(
        "",
        description="draft model, demo, head:FOLDER, or none: no drafters, drafts are n-grams of the text "
        "(default: that of the shipped pair, none with another --model)",
    )
    num_drafters: int = Field(
        1, ge=0, le=64, description="drafter processes; given without --model it serves the shipped pair"
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the target (default: all cores); the drafters share half as many"
    )
    listen: ListenAddress = Field("127.0.0.1:50051", description="gRPC address of the gateway; port 0 takes a free one")
    http_listen: ListenAddress = Field(
        "127.0.0.1:8000", description="HTTP address of the gateway; port 0 takes a free one"
    )
    served_model_name: str = Field(
        "", description="name clients use (default: the last part of --model, of a GGUF file its name without .gguf)"
    )
    redis_url: str = Field(
        "", description="a Redis that runs already; none: keep sessions in memory (default: start one)"
    )
    gateway_flags: str = Field("", description="more flags of the gateway, as in --gateway-flags='--max-num-seqs 8'")
    verifier_flags: str = Field("", description="more flags of the verifier")
    drafter_flags: str = Field(
        "",
        description="more flags of the drafters; given without --model it serves the shipped pair, for SmolLM2 has a head and no drafters",
    )
    start_timeout_s: float = Field(120.0, gt=0, description="how long the processes may take to be ready")
    shutdown_timeout_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for running requests")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_json: bool = Field(False, description="log as JSON lines")
