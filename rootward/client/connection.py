"""Connections of the SDK: addresses, channels and retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import cycle, islice
from typing import TypeVar

import grpc

from rootward.addresses import is_loopback
from rootward.clock import backoff_s
from rootward.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    RateLimitError,
    StaleEpoch,
    UnavailableError,
)
from rootward.wire.channel import NO_PROXY, client_options

T = TypeVar("T")

ApiKey = str | Callable[[], str]

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0
RESUME_ATTEMPTS = 10
RESUME_BACKOFF_S = 0.1
MAX_TAKEOVERS = 3  # attempts that another gateway took over; so often, another client resumes the same request
MAX_RETRY_AFTER_S = 60.0  # a call whose server asks for a longer pause fails


class Connection:
    """Channels to the addresses of a target, used round robin. They are opened on first use, in the event loop of the caller."""

    def __init__(
        self,
        target: str,
        *,
        api_key: ApiKey | None,
        connect_timeout_s: float,
        tls: grpc.ChannelCredentials | None,
        num_channels: int,
        channel_options: Mapping[str, str | int],
        metadata: Mapping[str, str],
    ):
        self.addresses, secure = parse_target(target)
        self._credentials = (tls or grpc.ssl_channel_credentials()) if secure or tls else None
        self._api_key = api_key
        self._metadata = dict(metadata)
        options = dict(client_options(round_robin=target.startswith("dns:")))
        if all(map(is_loopback, self.addresses)):
            options |= [NO_PROXY]
        options["grpc.min_reconnect_backoff_ms"] = int(connect_timeout_s * 1000)  # limit of one connection attempt
        self._options = [*(options | dict(channel_options)).items()]
        self._channels_per_address = -(-max(1, num_channels) // len(self.addresses))
        self._channels: list[grpc.aio.Channel] = []
        self._turns: Iterator[grpc.aio.Channel] = iter(())

    def channel(self) -> grpc.aio.Channel:
        """The next channel, without those that failed to connect as long as there is another: calls to a gateway that is down fail at
        once, so it would get most of the attempts."""
        if not self._channels:
            self._channels = [self._open(address) for address in self.addresses * self._channels_per_address]
            self._turns = cycle(self._channels)
        for channel in islice(self._turns, len(self._channels)):
            if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                break
        return channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call. ValueError for an API key that no header can hold."""
        pairs = [(k.lower(), v) for k, v in self._metadata.items()]
        if self._api_key is not None:
            key = self._api_key if isinstance(self._api_key, str) else self._api_key()
            if not (key.isascii() and key.isprintable()):  # gRPC would only say "Invalid metadata"
                raise ValueError(
                    "api_key: has a line break or a character outside of ASCII; strip what was read from a file"
                )
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
    """Retries of one call, before its first message and after (a stream that is resumed), under one deadline for all attempts."""

    def __init__(self, timeout_s: float, max_retries: int):
        self._timeout_s = timeout_s
        self._max = max_retries
        self._left = max_retries
        self._num_retries = 0
        self._num_takeovers = 0
        self._first_backoff_s = FIRST_BACKOFF_S
        self._deadline: float | None = None

    def allow_resume(self, error: APIError) -> bool:
        """Whether a stream that failed after its first message is to be resumed. If so, the next `attempt_until_success` has
        RESUME_ATTEMPTS attempts with short pauses, because a user is waiting for the rest of the text."""
        if not self._max or self._wait_s(error) is None:
            return False
        self._left = RESUME_ATTEMPTS
        self._num_retries = 0
        self._first_backoff_s = RESUME_BACKOFF_S
        return True

    async def attempt_until_success(self, attempt: Callable[[float], Awaitable[T]]) -> T:
        """The result of the first successful attempt. attempt: gets the seconds until the deadline."""
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
            self._num_retries += 1
            await asyncio.sleep(wait_s)

    def _wait_s(self, error: APIError) -> float | None:
        """Seconds until the next attempt; None if the error is permanent or the server asks for a longer pause than MAX_RETRY_AFTER_S.

        Called once for each error. A gateway may have taken the request over for an attempt that this client has given up: the next one
        takes it back."""
        taken_over = isinstance(error, APIStatusError) and error.reason == StaleEpoch.reason
        self._num_takeovers += taken_over
        transient = isinstance(error, APIConnectionError | UnavailableError | RateLimitError)
        transient |= taken_over and self._num_takeovers <= MAX_TAKEOVERS
        if isinstance(error, APITimeoutError) or not transient:
            return None
        retry_after_s = error.retry_after_s if isinstance(error, APIStatusError) else None
        if retry_after_s is not None:
            return retry_after_s if retry_after_s <= MAX_RETRY_AFTER_S else None
        return backoff_s(self._num_retries, self._first_backoff_s, MAX_BACKOFF_S, id(self))


def parse_target(target: str) -> tuple[list[str], bool]:
    """(addresses for gRPC, whether TLS is required). target: addresses separated by commas. ValueError: other scheme, no port."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme in ("grpc", "grpcs"):
        addresses = rest.rstrip("/").split(",")
    elif separator and scheme != "dns":
        raise ValueError(f"target: {target!r} has scheme {scheme!r}; use grpc://host:port or grpcs://host:port")
    else:
        addresses = target.split(",")
    for address in addresses:
        port = address.rpartition(":")[2]
        if not port.isdecimal():
            raise ValueError(f"target: {target!r} has no port; write host:port")
        if int(port) > 65535:  # gRPC would take its last 16 bits
            raise ValueError(f"target: {target!r} has port {port}; use one from 1 to 65535")
    return addresses, scheme == "grpcs"
