"""What the log says of refused calls."""

from __future__ import annotations

import logging

import pytest
from support.fake_clock import FakeClock

from rootward.errors import PermissionDenied, Unauthenticated
from rootward.wire.auth import MAX_PATH, MAX_REFUSALS, REFUSALS_S, RefusalLog


async def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    refusals = RefusalLog(clock)

    def lines(reason: str) -> list[logging.LogRecord]:
        return [record for record in caplog.records if vars(record)["reason"] == reason]

    with caplog.at_level(logging.WARNING):
        for _ in range(MAX_REFUSALS + 5):
            refusals.note(Unauthenticated("no key"), "/v1/models", "ipv4:10.0.0.7:1")
        refusals.note(PermissionDenied("no scope"), "/" + "a" * 9999, "ipv4:10.0.0.8:1")
        assert len(lines("INVALID_API_KEY")) == MAX_REFUSALS
        (other,) = lines("PERMISSION_DENIED")
        assert len(vars(other)["path"]) == MAX_PATH
        await clock.advance(REFUSALS_S)
        for _ in range(2):
            refusals.note(Unauthenticated("no key"), "/v1/models", "ipv4:10.0.0.7:1")
    told = [vars(line)["num_left_out"] for line in lines("INVALID_API_KEY")]
    assert told == [0] * MAX_REFUSALS + [5, 0]
