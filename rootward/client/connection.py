"""Connections of the SDK: where to, with what options, and when to try again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import grpc

from rootward.backoff import backoff_s
from rootward.client.types import KeepAlive
from rootward.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    RateLimitError,
    UnavailableError,
)
from rootward.wire.channel import CALLING, client_options

T = TypeVar("T")

ApiKey = str | Callable[[], str]

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 8.0
RESUME_ATTEMPTS = 10
RESUME_BACKOFF_S = 0.1
LONGEST_RETRY_AFTER_S = 60.0


class Connection:
    """A few channels to the addresses of a target, opened on first use inside the loop that uses them, taken in turn."""

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
        self.addresses, secure = parse_target(target)
        self._credentials = (tls or grpc.ssl_channel_credentials()) if secure or tls else None
        self._api_key = api_key
        self._metadata = dict(metadata)
        transport = replace(CALLING, keepalive_time_s=keepalive.time_s, keepalive_timeout_s=keepalive.timeout_s)
        options = dict(client_options(transport, round_robin=target.startswith("dns:")))
        options["grpc.min_reconnect_backoff_ms"] = int(connect_timeout_s * 1000)  # how long one attempt may take
        self._options = [*(options | dict(channel_options)).items()]
        each = -(-max(1, num_channels) // len(self.addresses))
        self._num_channels = each * len(self.addresses)
        self._channels: list[grpc.aio.Channel] = []
        self._turn = 0

    def channel(self) -> grpc.aio.Channel:
        """The next channel in turn, skipping those that failed to connect where there is another: a gateway that is down fails calls at
        once, and would get most of the attempts."""
        for _ in range(self._num_channels):
            channel = self._next()
            if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                break
        return channel

    def _next(self) -> grpc.aio.Channel:
        self._turn = (self._turn + 1) % self._num_channels
        while len(self._channels) <= self._turn:
            self._channels.append(self._open(self.addresses[len(self._channels) % len(self.addresses)]))
        return self._channels[self._turn]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        pairs = [(k.lower(), v) for k, v in self._metadata.items()]
        if self._api_key is not None:
            key = self._api_key if isinstance(self._api_key, str) else self._api_key()
            pairs.append(("authorization", f"Bearer {key}"))
        return tuple(pairs)

    async def close(self) -> None:
        channels = self._channels
        self._channels = []
        for channel in channels:
            await channel.close(None)

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        return grpc.aio.secure_channel(address, self._credentials, options=self._options)


class Retries:
    """Retries calls that failed before an answer, and resumes streams that broke later; one deadline for all attempts."""

    def __init__(self, timeout_s: float, max_retries: int):
        self._timeout_s = timeout_s
        self._max = max_retries
        self._left = max_retries
        self._num_waits = 0
        self._first_backoff_s = FIRST_BACKOFF_S
        self._deadline: float | None = None

    def resumes(self, error: APIError) -> bool:
        """Whether a stream that broke after its first message is resumed elsewhere. Then there are more attempts, and sooner: a
        generation waits."""
        if not self._max or self._wait_s(error) is None:
            return False
        self._left = RESUME_ATTEMPTS
        self._num_waits = 0
        self._first_backoff_s = RESUME_BACKOFF_S
        return True

    async def first(self, attempt: Callable[[float], Awaitable[T]]) -> T:
        """The result of the first attempt that succeeds; it is given the seconds left."""
        deadline = self._deadline = self._deadline or time.monotonic() + self._timeout_s
        last: APIError | None = None
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise last or APITimeoutError("the deadline passed before the server answered")
            try:
                return await attempt(left_s)
            except APIError as error:
                last = error
                wait_s = self._wait_s(error)
                if wait_s is None or self._left <= 0 or time.monotonic() + wait_s >= deadline:
                    raise
            self._left -= 1
            self._num_waits += 1
            await asyncio.sleep(wait_s)

    def _wait_s(self, error: APIError) -> float | None:
        """Seconds until the next attempt; None for an error that would come again."""
        again = isinstance(error, APIConnectionError | UnavailableError | RateLimitError)
        if isinstance(error, APITimeoutError) or not again:
            return None
        asked = error.retry_after_s if isinstance(error, APIStatusError) else None
        if asked is not None:
            return asked if asked <= LONGEST_RETRY_AFTER_S else None
        return backoff_s(self._num_waits, self._first_backoff_s, LONGEST_BACKOFF_S, id(self))


def parse_target(target: str) -> tuple[list[str], bool]:
    """(addresses for gRPC, whether TLS is asked for). Several gateways have commas between. ValueError for what is no gRPC target."""
    scheme, sep, rest = target.partition("://")
    if sep and scheme in ("grpc", "grpcs"):
        addresses = rest.rstrip("/").split(",")
        secure = scheme == "grpcs"
    elif sep and scheme not in ("dns", "ipv4", "ipv6", "unix"):
        raise ValueError(f"target: {target!r} has scheme {scheme!r}; use grpc://host:port or grpcs://host:port")
    else:
        addresses = [target] if target.startswith(("ipv4:", "ipv6:")) else target.split(",")
        secure = False
    for address in addresses:
        if not address.startswith("unix:") and not address.rpartition(":")[2].isdecimal():
            raise ValueError(f"target: {target!r} has no port; write host:port")
    return addresses, secure
