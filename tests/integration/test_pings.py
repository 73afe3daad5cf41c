"""A server's patience with pings, frame by frame (RFC 9113): gRPC's own ones come in bursts, a flood does not get through."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest

from rootward.wire.channel import DRAFTING, MOST_PINGS, SERVING, Transport
from rootward.wire.server import RpcServer

pytestmark = pytest.mark.services

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """On stream 0."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, bytes]]:
    """Type, flags and payload, until the connection ends."""
    while True:
        try:
            head = await reader.readexactly(9)
            yield head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return


async def answers(transport: Transport, pings: int) -> tuple[int, bytes]:
    """How many of so many pings are answered, one after the other, and what the server says when it ends the connection."""
    async with RpcServer("127.0.0.1:0", transport=transport) as server:
        await server.start()
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS) + frame(PING, bytes(8)))
        answered, last_words = 0, b""
        async with asyncio.timeout(60):
            async for kind, flags, payload in frames(reader):
                if kind == GOAWAY:
                    last_words = payload[8:]
                elif kind == PING and flags == ACK:
                    answered += 1
                    if answered == pings:
                        break
                    writer.write(frame(PING, bytes(8)))
        writer.close()
    return answered, last_words


@pytest.mark.parametrize("transport", [DRAFTING, SERVING])
async def test_a_burst_of_pings_is_answered(transport: Transport) -> None:
    """The fourth used to end the connection, and with it every tree that grew over it."""
    assert await answers(transport, 20) == (20, b"")


async def test_a_flood_of_pings_ends_the_connection() -> None:
    answered, last_words = await answers(SERVING, 3 * MOST_PINGS)
    assert answered < 3 * MOST_PINGS
    assert last_words == b"too_many_pings"
