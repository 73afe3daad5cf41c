"""Settings that every service has: certificates, probes, logs, traces."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from rootward.redis_client import KEY_PREFIX
from rootward.settings import CommaSeparated, ServiceSettings
from rootward.wire.tls import Certificates, ClientTls, ServerTls


class ProcessSettings(ServiceSettings):
    """Base class of the settings of the three services.

    Without certificates everything travels in the clear: for one machine, or a network that encrypts.
    """

    admin_listen: str = Field("", description="HTTP address of probes and metrics (default: none)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_json: bool = Field(False, description="log as JSON lines")
    tracing_endpoint: str = Field("", description="OTLP over gRPC, as http://host:4317 (default: no traces)")
    tracing_share: float = Field(1.0, ge=0, le=1, description="share of requests traced that no caller has decided on")
    redis_prefix: str = Field(
        KEY_PREFIX,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="first part of all keys in Redis; installations that share one Redis need different ones",
    )
    tls_certificate: Path | None = Field(None, description="PEM file of this role's certificate chain; turns TLS on")
    tls_key: Path | None = Field(None, description="PEM file of its key")
    tls_authority: Path | None = Field(None, description="PEM file of the authority that signs the other roles")
    tls_server_name: str = Field("", description="name in the certificates of services called (default: their host)")
    tls_peers: CommaSeparated = Field(
        default=[], description="names in the certificates of callers admitted, with commas between"
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        files = (self.tls_certificate, self.tls_key, self.tls_authority)
        if any(files) and not all(files):
            raise ValueError("give tls_certificate, tls_key and tls_authority together, or none of them")
        if not any(files) and (self.tls_peers or self.tls_server_name):
            raise ValueError("tls_peers and tls_server_name need tls_certificate, tls_key and tls_authority")
        return self

    @property
    def certificates(self) -> Certificates | None:
        """This role's files, None without TLS."""
        if self.tls_certificate is None or self.tls_key is None or self.tls_authority is None:
            return None
        return Certificates(self.tls_certificate, self.tls_key, self.tls_authority)

    @property
    def client_tls(self) -> ClientTls | None:
        """TLS of this role as a client."""
        return ClientTls(files, self.tls_server_name) if (files := self.certificates) else None

    @property
    def server_tls(self) -> ServerTls | None:
        """TLS of this role as a server: other services need a certificate of the authority."""
        return ServerTls(files, peers=tuple(self.tls_peers)) if (files := self.certificates) else None


class WorkerSettings(ProcessSettings):
    """Settings that verifier and drafter have in common: the model's device, and the address that peers use."""

    advertise: str = Field("", description="host:port that peers dial (default: the one it listens on)")
    zone: str = Field("", description="where it runs: near peers are tried first")
    device: str = Field("cpu", description="torch device")
    cuda_graphs: bool = Field(False, description="record forwards as CUDA graphs")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "auto",
        description="weights and arithmetic; auto: the checkpoint's; float32 on CPUs without bfloat16, except for the Llama family",
    )
    max_model_len: int | None = Field(None, ge=1, description="context in tokens (default: the model's)")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the model (default: all cores; drafters of `serve all` have fewer)"
    )
