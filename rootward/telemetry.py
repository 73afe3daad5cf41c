"""Logging of every process: one structured line per event, with the request that it belongs to.

    configure_logging("verifier", level="info", json=True)
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.info("admitted", slot=3)      # {"event": "admitted", "slot": 3, "request_id": "r1", "role": "verifier", …}

Standard-library loggers (gRPC, uvicorn, our own `logging.getLogger`) are formatted alike.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

from rootward.errors import ConfigurationError

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(role: str, level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Log to `stream` (default stderr) as JSON, or for people. May be called again; the last call counts."""
    if level.lower() not in LEVELS:
        raise ConfigurationError(f"log_level: {level!r} is unknown; use one of {', '.join(LEVELS)}")
    stream = stream or sys.stderr
    shared = _shared_processors(role)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_rendering(json, stream.isatty()))
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        cache_logger_on_first_use=False,
    )


def _shared_processors(role: str) -> list[Any]:
    def add_role(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("role", role)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_role,
    ]


def _rendering(json: bool, colors: bool) -> list[Any]:
    # Local variables in tracebacks would put prompts into the log.
    last: list[Any] = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    if json:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]
    return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
