"""Which drafters ratio tests may trust: records outlive restarts, add up over verifiers, and are cleared by operators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from itertools import count

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import ConnectionError as RedisConnectionError
from support.cheats import drawn_by

from rootward.core.audit import STRATEGIES
from verifier_service import audit as audit_module
from verifier_service.audit import KEPT_S, Audited, DrafterAudit

DRAFTER = "10.0.0.7:50053"
NUMBERS = count()


class FakeRedis:
    """Hashes in memory."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, str]] = {}
        self.ends: dict[str, int] = {}
        self.away = False

    def _hash(self, key: str) -> dict[str, str]:
        if self.away:
            raise RedisConnectionError("away")
        return self.hashes.setdefault(key, {})

    async def hgetall(self, key: str) -> dict[str, str]:
        return dict(self._hash(key))

    async def hget(self, key: str, field: str) -> str | None:
        return self._hash(key).get(field)

    async def hset(self, key: str, field: str, value: str) -> None:
        self._hash(key)[field] = value

    async def hdel(self, key: str, *fields: str) -> None:
        for field in fields:
            self._hash(key).pop(field, None)

    async def expire(self, key: str, seconds: int) -> None:
        self.ends[key] = seconds

    async def hincrby(self, key: str, field: str, amount: int) -> None:
        self._hash(key)[field] = str(int(self._hash(key).get(field, 0)) + amount)


@asynccontextmanager
async def running(audit: DrafterAudit, up: Sequence[str] = ()):
    task = asyncio.create_task(audit.run(lambda: up))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def exchanged(audit: DrafterAudit, up: Sequence[str] = ()) -> None:
    """One turn of `run` while these drafters are up."""
    async with running(audit, up):
        for _ in range(60):
            await asyncio.sleep(0)


def audit_of(redis: FakeRedis | None = None, **options: object) -> DrafterAudit:
    return DrafterAudit(CollectorRegistry(), f"verifier-{next(NUMBERS)}", redis=redis, **options)


def watch(audit: DrafterAudit, cheat: str, num: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(num // 16):
        audit.observe(DRAFTER, drawn_by(cheat, rng, 16))


def test_a_cheating_drafter_is_caught_and_an_honest_one_is_not():
    registry = CollectorRegistry()
    audit = DrafterAudit(registry, "v")
    watch(audit, "honest", 4096)
    assert audit.trusts(DRAFTER, "default")
    audit = DrafterAudit(registry := CollectorRegistry(), "v")
    watch(audit, "argmax", 512)
    assert not audit.trusts(DRAFTER, "default")
    assert audit.trusts("another", "default")
    assert audit.gauges() == {f"drafter_caught/{DRAFTER}": 1.0}
    assert registry.get_sample_value("rootward_drafter_audit_alarms_total", {"drafter": DRAFTER}) == 1.0
    assert registry.get_sample_value("rootward_drafter_audit_log_wealth", {"drafter": DRAFTER}) > 13.8
    watch(audit, "argmax", 512)
    assert registry.get_sample_value("rootward_drafter_audit_alarms_total", {"drafter": DRAFTER}) == 1.0


def test_untrusted_pools_are_not_trusted():
    audit = audit_of(untrusted_pools=["spot"])
    assert not audit.trusts(DRAFTER, "spot")
    assert audit.trusts(DRAFTER, "default")


async def test_a_restart_of_the_verifier_does_not_launder_a_record():
    redis = FakeRedis()
    first = audit_of(redis)
    watch(first, "argmax", 512)
    await exchanged(first)
    second = audit_of(redis)
    second.observe(DRAFTER, drawn_by("honest", np.random.default_rng(1), 0))
    await exchanged(second)
    assert not second.trusts(DRAFTER, "default")
    assert redis.ends.keys() == redis.hashes.keys()  # those of addresses that nobody has any more are forgotten


async def test_a_verifier_that_starts_trusts_no_drafter_before_it_has_asked_for_its_record():
    redis = FakeRedis()
    first = audit_of(redis)
    watch(first, "argmax", 512)
    await exchanged(first)
    second = audit_of(redis)
    assert not second.trusts("another", "default")
    await exchanged(second, up=[DRAFTER])  # nothing of it was seen yet
    assert second.gauges() == {f"drafter_caught/{DRAFTER}": 1.0}
    assert second.trusts("another", "default")


async def test_a_verifier_that_sees_no_draws_learns_what_others_caught():
    """Its sessions would be verified by ratio tests again as soon as the drafter gets one of them."""
    redis = FakeRedis()
    idle, busy = audit_of(redis), audit_of(redis)
    await exchanged(idle, up=[DRAFTER])
    assert idle.trusts(DRAFTER, "default")
    watch(busy, "argmax", 512)
    await exchanged(busy)
    await exchanged(idle, up=[DRAFTER])
    assert not idle.trusts(DRAFTER, "default")


async def test_a_drafter_is_trusted_while_redis_is_away():
    redis = FakeRedis()
    redis.away = True
    audit = audit_of(redis)
    assert not audit.trusts(DRAFTER, "default")
    await exchanged(audit)
    assert audit.trusts(DRAFTER, "default")


async def test_a_redis_that_does_not_answer_delays_the_drafters_together():
    """It took its time for each, so that the last of many drafters waited for minutes to be trusted."""
    redis, names = FakeRedis(), [f"10.0.0.{i}:50053" for i in range(8)]
    waiting, answer = 0, asyncio.Event()

    async def hget(key: str, field: str) -> None:
        nonlocal waiting
        waiting += 1
        await answer.wait()
        raise RedisConnectionError("away")

    redis.hget = hget
    audit = audit_of(redis)
    async with running(audit, names):
        for _ in range(60):
            await asyncio.sleep(0)
        assert waiting == len(names)
        answer.set()
        for _ in range(60):
            await asyncio.sleep(0)
    assert all(audit.trusts(name, "default") for name in names)


async def test_evidence_of_several_verifiers_adds_up():
    """Neither verifier alone has seen enough."""
    redis = FakeRedis()
    audits = [audit_of(redis) for _ in range(4)]
    for seed, audit in enumerate(audits):
        watch(audit, "argmax", 16, seed)
        await exchanged(audit)
    assert not audits[-1].trusts(DRAFTER, "default")
    alone = audit_of()
    watch(alone, "argmax", 16)
    await exchanged(alone)
    assert alone.trusts(DRAFTER, "default")


async def test_an_operator_clears_a_drafter():
    redis, registry = FakeRedis(), CollectorRegistry()
    audit = DrafterAudit(registry, "v", redis=redis)

    def caught() -> float | None:
        return registry.get_sample_value("rootward_drafter_audit_caught", {"drafter": DRAFTER})

    watch(audit, "argmax", 512)
    await exchanged(audit)
    assert caught() == 1.0
    await redis.hincrby(f"rw:audit:{DRAFTER}", "cleared", 1)
    await exchanged(audit)
    assert audit.trusts(DRAFTER, "default")
    assert caught() == 0.0
    newcomer = audit_of(redis)
    watch(newcomer, "honest", 16)
    await exchanged(newcomer)
    assert newcomer.trusts(DRAFTER, "default")
    watch(audit, "honest", 1024)
    await exchanged(audit)
    assert audit.trusts(DRAFTER, "default")
    watch(audit, "argmax", 512)
    assert not audit.trusts(DRAFTER, "default")


async def test_a_redis_that_loses_its_data_gets_them_back():
    redis = FakeRedis()
    audit = audit_of(redis)
    watch(audit, "argmax", 512)
    await exchanged(audit)
    redis.hashes.clear()
    await exchanged(audit)
    second = audit_of(redis)
    watch(second, "honest", 16)
    await exchanged(second)
    assert not second.trusts(DRAFTER, "default")


async def test_fields_of_processes_that_are_gone_are_removed_and_a_catch_is_not_forgotten():
    redis, time = FakeRedis(), [1.8e9]

    def started() -> DrafterAudit:
        return audit_of(redis, wall_s=lambda: time[0])

    seen_honest, seen_cheating = started(), started()
    watch(seen_honest, "honest", 64)
    watch(seen_cheating, "argmax", 512)
    for gone in (seen_honest, seen_cheating):
        await exchanged(gone)
    for _ in range(20):
        time[0] += 0.4 * KEPT_S
        verifier = started()
        watch(verifier, "honest", 16)
        await exchanged(verifier)
        assert not verifier.trusts(DRAFTER, "default")
        await exchanged(verifier)  # has read the alarm, and tells it
        assert len(redis.hashes[f"rw:audit:{DRAFTER}"]) <= 4
    await redis.hincrby(f"rw:audit:{DRAFTER}", "cleared", 1)
    await exchanged(started(), up=[DRAFTER])
    assert redis.hashes[f"rw:audit:{DRAFTER}"] == {"cleared": "1"}


async def test_an_alarm_is_removed_only_by_a_process_that_has_written_it():
    redis, time = FakeRedis(), [1.8e9]
    first = audit_of(redis, wall_s=lambda: time[0])
    watch(first, "argmax", 512)
    await exchanged(first)
    time[0] += 2 * KEPT_S
    for _ in range(2):  # each ends before it has written the alarm
        second = audit_of(redis, wall_s=lambda: time[0])
        await exchanged(second, up=[DRAFTER])
        assert not second.trusts(DRAFTER, "default")


async def test_repeated_exchanges_count_once():
    redis = FakeRedis()
    audits = [audit_of(redis) for _ in range(2)]
    for seed, audit in enumerate(audits):
        watch(audit, "temperature:0.8", 64, seed)
        for _ in range(3):
            await exchanged(audit)
    wealth = sum(a._drafters[DRAFTER].own for a in audits)
    np.testing.assert_allclose(audits[1]._drafters[DRAFTER].record.log_product, wealth)


UNREADABLE = {
    "no JSON": "{",
    "no record": "[]",
    "lacks the alarm": '{"cleared": 0, "log_product": [0.0]}',
    "no numbers": '{"cleared": 0, "draws": 1, "caught": "", "log_product": ["x"]}',
    "numbers without an end": f'{{"cleared": 1e999, "draws": 1, "caught": "", "log_product": {[0.0] * len(STRATEGIES)}}}',
    "a time without an end": f'{{"cleared": 0, "written_s": 1{"0" * 400}, "caught": "", "log_product": [0.0]}}',
    "nested": '{"log_product": ' + "[" * 100_000,
    "no finite numbers": f'{{"cleared": 0, "draws": 1, "caught": "", "log_product": {["NaN"] * len(STRATEGIES)}}}'.replace(
        "'", ""
    ),
    "other strategies": '{"cleared": 0, "draws": 1, "caught": "", "log_product": [0.0, 0.0, 0.0]}',
}


@pytest.mark.parametrize(
    ("field", "value"),
    [*((f"v {why}", value) for why, value in UNREADABLE.items()), ("cleared", "yes"), ("cleared", "9" * 5000)],
)
async def test_a_field_that_cannot_be_read_ends_neither_the_audit_nor_the_trust_in_a_drafter(field: str, value: str):
    redis = FakeRedis()
    redis.hashes[f"rw:audit:{DRAFTER}"] = {field: value}
    audit, other = audit_of(redis), "10.0.0.8:50053"
    async with running(audit, [DRAFTER, other]):
        for _ in range(60):
            await asyncio.sleep(0)
        assert audit.trusts(DRAFTER, "default")
        assert audit.trusts(other, "default")
        watch(audit, "argmax", 128)  # fewer than a batch: `run` evaluates them, if it still runs
        audit._new.set()
        for _ in range(60):
            await asyncio.sleep(0)
        assert not audit.trusts(DRAFTER, "default")


async def test_a_bug_in_the_exchange_of_one_drafter_does_not_end_the_audit(monkeypatch: pytest.MonkeyPatch):
    redis = FakeRedis()
    audit, other = audit_of(redis), "10.0.0.8:50053"
    exchange = audit._exchange

    async def broken(name: str, audited: Audited) -> None:
        if name == DRAFTER:
            raise ZeroDivisionError
        await exchange(name, audited)

    monkeypatch.setattr(audit, "_exchange", broken)
    async with running(audit, [DRAFTER, other]):
        for _ in range(60):
            await asyncio.sleep(0)
        assert not audit.trusts(DRAFTER, "default")
        assert audit.trusts(other, "default")


async def test_an_alarm_of_a_release_with_other_strategies_counts():
    redis = FakeRedis()
    alarm = '{"cleared": 0, "draws": 9, "caught": "new", "log_product": [0.0, 0.0, 0.0]}'
    redis.hashes[f"rw:audit:{DRAFTER}"] = {"v": alarm}
    audit = audit_of(redis)
    await exchanged(audit, up=[DRAFTER])
    assert not audit.trusts(DRAFTER, "default")


async def test_without_redis_the_audit_continues():
    redis = FakeRedis()
    redis.away = True
    audit = audit_of(redis)
    watch(audit, "argmax", 512)
    await exchanged(audit)
    assert not audit.trusts(DRAFTER, "default")


@pytest.mark.parametrize("with_redis", [False, True])
async def test_drafters_that_are_long_gone_are_forgotten_and_caught_ones_are_not(with_redis: bool):
    now_s = 1e9
    audit = audit_of(FakeRedis() if with_redis else None, wall_s=lambda: now_s)
    watch(audit, "argmax", 512)
    rng = np.random.default_rng(2)
    for name in ("gone", "stays"):
        audit.observe(name, drawn_by("honest", rng, 16))
    await exchanged(audit, up=["stays"])
    now_s += KEPT_S - 1
    await exchanged(audit, up=["stays"])
    assert audit._drafters.keys() == {DRAFTER, "gone", "stays"}
    now_s += 2
    await exchanged(audit, up=["stays"])
    assert audit._drafters.keys() == {DRAFTER, "stays"}
    assert audit._drafters["stays"].record.num_draws == 16
    assert not audit.trusts(DRAFTER, "default")
    audit.observe("gone", drawn_by("honest", rng, 16))  # an address may be used again
    await exchanged(audit)
    assert audit.trusts("gone", "default")


@pytest.mark.parametrize("num", [1, 100])
def test_draws_are_evaluated_in_batches(num: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_module, "BATCH_DRAWS", num)
    audit = audit_of()
    watch(audit, "argmax", 16 * 10)
    assert audit.trusts(DRAFTER, "default") is False
