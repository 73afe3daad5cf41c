"""Connections of the SDK: where to, with what options, and when to try again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import grpc

from rootward.client_types import KeepAlive
from rootward.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    ConflictError,
    RateLimitError,
    UnavailableError,
)
from rootward.rpc.channel import MIB, Transport, client_options

T = TypeVar("T")

ApiKey = str | Callable[[], str]

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 8.0
LONGEST_RETRY_AFTER_S = 60.0
MAX_MESSAGE_BYTES = 64 * MIB


class Connection:
    """A few channels to one target, opened on first use inside the loop that uses them, taken in turn."""

    def __init__(
        self,
        target: str,
        *,
        api_key: ApiKey | None,
        connect_timeout_s: float,
        tls: grpc.ChannelCredentials | None,
        keepalive: KeepAlive,
        num_channels: int,
        channel_options: Mapping[str, str | int],
        metadata: Mapping[str, str],
    ):
        self.address, secure = parse_target(target)
        self._credentials = (tls or grpc.ssl_channel_credentials()) if secure or tls else None
        self._api_key, self._metadata = api_key, dict(metadata)
        transport = Transport(MAX_MESSAGE_BYTES, None, keepalive.time_s, keepalive.timeout_s)
        options = dict(client_options(transport, round_robin=self.address.startswith("dns:")))
        options["grpc.min_reconnect_backoff_ms"] = int(connect_timeout_s * 1000)  # how long one attempt may take
        self._options = [*(options | dict(channel_options)).items()]
        self._num_channels = max(1, num_channels)
        self._channels: list[grpc.aio.Channel] = []
        self._turn = 0

    def channel(self) -> grpc.aio.Channel:
        """The next channel in turn."""
        self._turn = (self._turn + 1) % self._num_channels
        while len(self._channels) <= self._turn:
            self._channels.append(self._open())
        return self._channels[self._turn]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        pairs = [(k.lower(), v) for k, v in self._metadata.items()]
        if self._api_key is not None:
            key = self._api_key if isinstance(self._api_key, str) else self._api_key()
            pairs.append(("authorization", f"Bearer {key}"))
        return tuple(pairs)

    async def close(self) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close(None)

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, options=self._options)
        return grpc.aio.secure_channel(self.address, self._credentials, options=self._options)


class Retries:
    """Tries again what failed before anything was received, within one deadline for all attempts."""

    def __init__(self, timeout_s: float, max_retries: int):
        self._timeout_s = timeout_s
        self._left = max_retries
        self._tried = False

    async def first(self, attempt: Callable[[float], Awaitable[T]]) -> T:
        """The result of the first attempt that succeeds; it is given the seconds left."""
        backoff_s = FIRST_BACKOFF_S
        deadline = time.monotonic() + self._timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise APITimeoutError("the deadline passed before the server answered")
            try:
                return await attempt(left_s)
            except APIError as error:
                wait_s = self._wait_s(error, backoff_s)
                if wait_s is None or self._left <= 0 or time.monotonic() + wait_s >= deadline:
                    raise
            self._left -= 1
            self._tried = True
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            await asyncio.sleep(wait_s)

    def _wait_s(self, error: APIError, backoff_s: float) -> float | None:
        """Seconds until the next attempt; None for an error that would come again."""
        if isinstance(error, APITimeoutError) or not self._worth_it(error):
            return None
        asked = error.retry_after_s if isinstance(error, APIStatusError) else None
        if asked is not None:
            return asked if asked <= LONGEST_RETRY_AFTER_S else None
        return backoff_s * random.uniform(0.5, 1.0)

    def _worth_it(self, error: APIError) -> bool:
        # The server may not have noticed yet that the connection of the attempt before is gone.
        own_ghost = self._tried and isinstance(error, ConflictError) and error.reason == "DUPLICATE_REQUEST_ID"
        return own_ghost or isinstance(error, APIConnectionError | UnavailableError | RateLimitError)


def parse_target(target: str) -> tuple[str, bool]:
    """(address for gRPC, whether TLS is asked for). ValueError for what is no gRPC target."""
    scheme, sep, rest = target.partition("://")
    if sep and scheme in ("grpc", "grpcs"):
        address, secure = rest.rstrip("/"), scheme == "grpcs"
    elif sep and scheme not in ("dns", "ipv4", "ipv6", "unix"):
        raise ValueError(f"target: {target!r} has scheme {scheme!r}; use grpc://host:port or grpcs://host:port")
    else:
        address, secure = target, False
    if not address.startswith("unix:") and not address.rpartition(":")[2].isdecimal():
        raise ValueError(f"target: {target!r} has no port; write host:port")
    return address, secure
