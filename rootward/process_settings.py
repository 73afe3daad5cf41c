"""What every service's process has: certificates, probes, logs, traces."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rootward.tls_settings import TlsSettings


class ProcessSettings(TlsSettings):
    """Base class of the three services' settings."""

    admin_listen: str = Field("", description="HTTP address of probes and metrics (default: none)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_json: bool = Field(False, description="log as JSON lines")
    tracing_endpoint: str = Field("", description="OTLP over gRPC, as http://host:4317 (default: no traces)")
    tracing_share: float = Field(1.0, ge=0, le=1, description="share of requests traced that no caller has decided on")
