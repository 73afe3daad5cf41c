"""`SlowLink`: order and times of arrival, loss, and the bytes that may be in flight."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from benchmarks.slow_link import SEGMENT_BYTES, Conditions, Pace, SlowLink


def arrivals(on: Conditions, sizes: list[int], seed: int = 1) -> list[float]:
    pace = Pace(seed)
    return [pace.arrival_s(0.0, size, on) for size in sizes]


def test_delay_and_bandwidth_add_up() -> None:
    assert arrivals(Conditions(delay_s=0.5, bandwidth=100.0), [50, 50]) == [1.0, 1.5]


def test_jitter_and_loss_delay_and_never_reorder() -> None:
    on = Conditions(delay_s=0.01, jitter_s=0.02, loss=0.3)
    times = arrivals(on, [SEGMENT_BYTES] * 500)
    assert times == sorted(times)
    assert min(times) >= 0.01
    assert max(times) > 0.01 + 0.02  # some were lost
    assert arrivals(on, [10] * 50) == arrivals(on, [10] * 50)  # equal seeds, equal times


def test_a_larger_chunk_is_lost_more_often() -> None:
    on = Conditions(delay_s=1.0, loss=0.1)

    def late(size: int) -> int:
        return sum(Pace(seed).arrival_s(0.0, size, on) > 1.0 for seed in range(300))

    assert late(10 * SEGMENT_BYTES) > 3 * late(SEGMENT_BYTES)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"delay_s": -1}, "delay_s"),
        ({"loss": 1.0}, "loss"),
        ({"bandwidth": -1}, "bandwidth"),
        ({"window_bytes": 0}, "w"),
    ],
)
def test_conditions_out_of_range_are_refused(wrong: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        Conditions(**wrong)


@asynccontextmanager
async def echo():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


async def test_bytes_pass_in_order_and_are_counted() -> None:
    async with echo() as address, SlowLink(address, Conditions(delay_s=0.001, jitter_s=0.003, loss=0.2)) as link:
        reader, writer = await asyncio.open_connection(*link.address.split(":"))
        sent = bytes(range(256)) * 400
        for start in range(0, len(sent), 777):
            writer.write(sent[start : start + 777])
        assert await asyncio.wait_for(reader.readexactly(len(sent)), 20) == sent
        assert link.num_bytes == [len(sent)] * 2
        writer.close()


async def test_a_cut_ends_connections_and_the_next_connection_works() -> None:
    async with echo() as address, SlowLink(address) as link:
        reader, writer = await asyncio.open_connection(*link.address.split(":"))
        writer.write(b"x")
        assert await asyncio.wait_for(reader.readexactly(1), 20) == b"x"
        await link.cut()
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        reader, writer = await asyncio.open_connection(*link.address.split(":"))
        writer.write(b"y")
        assert await asyncio.wait_for(reader.readexactly(1), 20) == b"y"
        writer.close()


async def test_a_sender_that_is_faster_than_the_link_is_blocked() -> None:
    slow = Conditions(delay_s=60.0, window_bytes=4096)  # nothing arrives while this test runs
    async with echo() as address, SlowLink(address, slow) as link:
        _, writer = await asyncio.open_connection(*link.address.split(":"))
        writer.write(bytes(64 << 20))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.5)
        assert link.num_bytes[0] < 1 << 20
        writer.close()
