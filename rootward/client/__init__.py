"""The Python SDK: `AsyncClient`, and `Client`, the same for code without an event loop.

    client = Client("127.0.0.1:50051")
    result = client.generate("def fib(n):", sampling=SamplingParams(temperature=0, max_tokens=64))
    with client.stream("def fib(n):") as stream:
        for delta in stream:
            print(delta.text, end="")
        result = stream.get_final_result()

Errors are those of `rootward.errors` below `APIError`. Every call has a deadline. Leaving a stream cancels it on the server.
"""

from __future__ import annotations

from rootward.client.asynchronous import AsyncClient, AsyncStream
from rootward.client.blocking import Client, Stream
from rootward.client.types import (
    GenerationResult,
    Load,
    RequestOptions,
    Round,
    SamplingParams,
    ServerInfo,
    SessionEvent,
    Speculation,
    SpeculationStats,
    Timing,
    TokenDelta,
    TokenLogprob,
    Usage,
    VerifierLoad,
    Worker,
)
from rootward.values import ModelInfo as ModelCard

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "GenerationResult",
    "Load",
    "ModelCard",
    "RequestOptions",
    "Round",
    "SamplingParams",
    "ServerInfo",
    "SessionEvent",
    "Speculation",
    "SpeculationStats",
    "Stream",
    "Timing",
    "TokenDelta",
    "TokenLogprob",
    "Usage",
    "VerifierLoad",
    "Worker",
]
