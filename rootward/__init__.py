"""Rootward: lossless tree-speculative serving of large language models.

The names below are loaded on first use, so that `import rootward` costs nothing and never pulls in torch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rootward.client import AsyncClient, Client, KeepAlive, SamplingParams, Speculation
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
    "KeepAlive",
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

_FROM_CLIENT = {"AsyncClient", "Client", "KeepAlive", "SamplingParams", "Speculation"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'rootward' has no attribute {name!r}")
    module = import_module("rootward.client" if name in _FROM_CLIENT else "rootward.errors")
    return getattr(module, name)


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
