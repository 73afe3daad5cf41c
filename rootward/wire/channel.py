"""Limits and options of every gRPC connection, for both ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from rootward.wire.tls import ClientTls

M = TypeVar("M", bound=Message)
Options = list[tuple[str, str | int]]

MIB = 1 << 20
MAX_ITEM_BYTES = 63 * MIB  # of one item, which is never divided, so that its message stays within the limits of a hop
FRAME_BYTES = MIB  # of one message of a stream of frames, unless one item alone is larger
NO_PROXY = ("grpc.enable_http_proxy", 0)  # do not take the proxy of http_proxy in the environment
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000  # between pings on a connection, and for their answers
MOST_PINGS = 100  # pings in a row that come too early; more end the connection


@dataclass(frozen=True, slots=True)
class Transport:
    """Limits of one kind of hop. `max_connection_age_s` makes clients reconnect, so that new servers get their share of them."""

    max_receive_bytes: int  # of one message, as those that follow
    max_send_bytes: int = 64 * MIB
    max_connection_age_s: float | None = None


CALLING = Transport(64 * MIB)  # the caller's end of a hop: answers may have log-probabilities of a long prompt
SERVING = Transport(16 * MIB, max_connection_age_s=30 * 60)  # a verifier: prompts of millions of tokens
# A drafter: a text that reached the verifier reaches it, too; its own frames are small.
DRAFTING = Transport(16 * MIB, 4 * MIB)
TO_DRAFTER = Transport(4 * MIB, 16 * MIB)  # the verifier's end of that hop
MAX_REQUEST_BYTES = 2 * MIB  # of a client, unless the gateway is configured otherwise


def public(max_request_bytes: int = MAX_REQUEST_BYTES) -> Transport:
    """The gateway's end of the connections of its clients."""
    return replace(SERVING, max_receive_bytes=max_request_bytes)


def client_options(transport: Transport = CALLING, *, round_robin: bool = False) -> Options:
    """Dead peers are detected within KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS, restarted ones reconnected within seconds."""
    options: Options = [
        *_common(transport),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),  # the default of two minutes outlives every restart
        ("grpc.min_reconnect_backoff_ms", 5000),  # despite its name also how long one attempt to connect may take
        ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: a single one saturates
    ]
    if round_robin:
        options.append(("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})))
    return options


def server_options(transport: Transport = SERVING) -> Options:
    """Pings are allowed every 10 s and without calls: the default of 300 s ends connections during long prefills. And some may come sooner:
    gRPC's own pings that measure the bandwidth follow data, but count as keepalive pings. By default the third in a row ends the
    connection; every frame with data resets the count."""
    options: Options = [
        *_common(transport),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", MOST_PINGS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its connections silently
    ]
    if transport.max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", int(transport.max_connection_age_s * 1000)))
    return options


def open_channel(address: str, transport: Transport = CALLING, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to "host:port" or "dns:///name:port" (then balanced over all addresses). Needs a running event loop."""
    options = client_options(transport, round_robin=address.startswith("dns:"))
    options.append(NO_PROXY)  # services reach one another directly
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    chain, key, authority = tls.certificates.read()
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority, key, chain), options=options)


def split_message(message: M, limit_bytes: int = FRAME_BYTES) -> Iterator[M]:
    """The message itself, or if it is too large the same content in several, order kept.

    For messages whose fields are all messages: a frame that opens many long prompts at once. An item is never divided.
    """
    if message.ByteSize() <= limit_bytes:
        yield message
        return
    part = type(message)()
    size = 0
    for name, item, repeated in _items(message):
        item_bytes = item.ByteSize()
        if size and size + item_bytes > limit_bytes:
            yield part
            part = type(message)()
            size = 0
        part.MergeFrom(type(message)(**{name: [item] if repeated else item}))
        size += item_bytes
    yield part


def _items(message: Message) -> Iterator[tuple[str, Message, bool]]:
    """(field, item, whether the field is repeated) in the order of the fields."""
    for descriptor, value in message.ListFields():
        repeated = not isinstance(value, Message)
        for item in value if repeated else (value,):
            yield descriptor.name, item, repeated


def _common(transport: Transport) -> Options:
    return [
        ("grpc.max_receive_message_length", transport.max_receive_bytes),
        ("grpc.max_send_message_length", transport.max_send_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]
