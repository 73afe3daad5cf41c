"""The record of running requests: what is written, when, and which epochs may be given out."""

import asyncio

import pytest

from gateway.ledger import Ledger
from gateway.sessions import MemoryStore, Run, StoreUnavailable, Write
from rootward.errors import StaleEpoch, Unavailable


class Counting(MemoryStore):
    """Counts writes with tokens; `dead` makes every call fail."""

    def __init__(self):
        super().__init__(now=lambda: self.time)
        self.time, self.appends, self.dead = 0.0, 0, False

    async def begin(self, *args):
        self._check()
        return await super().begin(*args)

    async def take_over(self, *args):
        self._check()
        return await super().take_over(*args)

    async def next_epoch(self, *args):
        self._check()
        return await super().next_epoch(*args)

    async def record(self, *args):
        self._check()
        return await super().record(*args)

    async def write(self, writes, ttl_s):
        self._check()
        self.appends += sum(bool(w.run) for w in writes)
        return await super().write(writes, ttl_s)

    def _check(self):
        if self.dead:
            raise StoreUnavailable("gone")


def run(*tokens):
    return Run(tokens, (False,) * len(tokens))


async def logged(store):
    return (await store.record("r")).output.tokens


@pytest.fixture
def store():
    return Counting()


@pytest.fixture
def ledger(store):
    return Ledger(store, now=lambda: store.time, lease_s=6.0, flush_s=0.0)


async def test_many_runs_are_one_write(store, ledger):
    entry = await ledger.begin("r")
    for token in range(100):
        ledger.extend(entry, run(token))
    await ledger.flush()
    await ledger.flush()
    assert store.appends == 1
    assert await logged(store) == tuple(range(100))
    ledger.end(entry, "finished")
    await ledger.flush()
    assert store._requests["r"].fields["state"] == "finished"
    assert not ledger._entries


async def test_leases_are_renewed_at_a_third_of_their_time(store, ledger):
    entry = await ledger.begin("r")
    for _ in range(10):
        store.time += 2.1
        await ledger.flush()
        assert not entry.lost
        assert store._requests["r"].lease_until == store.time + 6


async def test_a_lost_lease_stops_the_request(store, ledger):
    entry = await ledger.begin("r")
    store.time += 10
    await store.begin("r", "another", 60, {})
    await ledger.flush()
    with pytest.raises(StaleEpoch):
        ledger.extend(entry, run(1))
    ledger.end(entry, "interrupted")
    await ledger.flush()
    assert store._requests["r"].holder == "another"
    assert not ledger._entries


async def test_a_log_that_vanished_is_written_again(store, ledger):
    entry = await ledger.begin("r")
    ledger.extend(entry, run(1, 2))
    await ledger.flush()
    store._requests.clear()  # Redis restarted empty
    ledger.extend(entry, run(3))
    for _ in range(3):
        await ledger.flush()
    assert await logged(store) == (1, 2, 3)


async def test_an_append_whose_answer_was_lost_is_not_written_twice(store, ledger):
    entry = await ledger.begin("r")
    ledger.extend(entry, run(1, 2))
    await MemoryStore.write(store, [Write(entry.lease, 0, run(1, 2))], 6.0)
    ledger.extend(entry, run(3))
    for _ in range(3):
        await ledger.flush()
    assert await logged(store) == (1, 2, 3)


async def test_epochs_go_up_even_when_the_store_forgot_them(store, ledger):
    entry = await ledger.begin("r")
    for epoch in (2, 3):
        await ledger.next_epoch(entry)
        assert entry.epoch == epoch
    store._requests.clear()
    await ledger.next_epoch(entry)
    assert entry.epoch == 4
    assert store._requests["r"].epoch == 4


async def test_without_the_store_epochs_are_counted_on_only_while_the_lease_lasts(store, ledger):
    entry = await ledger.begin("r")
    store.dead = True
    store.time += 5.9
    await ledger.next_epoch(entry)
    assert entry.epoch == 2
    store.time += 0.2
    with pytest.raises(Unavailable, match="lease of this request has run out"):
        await ledger.next_epoch(entry)
    assert entry.epoch == 2


async def test_a_request_begun_without_the_store_is_recorded_later(store, ledger):
    store.dead = True
    entry = await ledger.begin("r")
    assert entry.epoch == 1
    ledger.extend(entry, run(1))
    await ledger.flush()
    store.dead = False
    store.time += 5
    for _ in range(3):
        await ledger.flush()
    assert await logged(store) == (1,)
    with pytest.raises(Exception, match="running already"):
        await store.begin("r", "another", 5, {})


async def test_ended_requests_do_not_pile_up_while_the_store_is_gone(store, ledger):
    entry = await ledger.begin("r")
    store.dead = True
    ledger.extend(entry, run(1))
    ledger.end(entry, "finished")
    await ledger.flush()
    assert ledger._entries
    store.time += 61
    await ledger.flush()
    assert not ledger._entries


async def test_the_loop_writes_and_sleeps_when_there_is_nothing(store, ledger):
    loop = asyncio.create_task(ledger.run())
    entry = await ledger.begin("r")
    ledger.extend(entry, run(1))
    await asyncio.sleep(0.05)
    assert await logged(store) == (1,)
    assert store.appends == 1
    loop.cancel()


async def test_what_is_remembered_is_known_at_once(store, ledger):
    ledger.remember("talk", {"verifier": "v1"})
    assert await ledger.recall("talk") == {"verifier": "v1"}
    await ledger.flush()
    assert await ledger.recall("talk") == {"verifier": "v1"}
