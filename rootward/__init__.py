"""Rootward: lossless tree-speculative serving of large language models.

The client is loaded on first use, so that `import rootward` is fast and never imports torch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rootward.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    DeadlineExceededError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RootwardError,
    StreamInterruptedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from rootward.client import AsyncClient, Client, SamplingParams, Speculation

    __version__: str

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncClient",
    "AuthenticationError",
    "BadRequestError",
    "Client",
    "ConflictError",
    "DeadlineExceededError",
    "InternalServerError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RootwardError",
    "SamplingParams",
    "Speculation",
    "StreamInterruptedError",
    "UnavailableError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'rootward' has no attribute {name!r}")
    return getattr(import_module("rootward.client"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


@cache
def _version() -> str:
    """Version of the installed distribution; "0+unknown" when the source tree is used without installing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rootward")
    except PackageNotFoundError:
        return "0+unknown"
