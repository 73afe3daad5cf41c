"""A request that three real verifiers die of: two do, by a segmentation fault, and no stream of anybody else notices."""

from __future__ import annotations

import asyncio
import signal

import pytest
from chaos.suite import NUM_TOKENS, TABLES, Failures, load, standing

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]


async def test_a_poison_request_ends_two_of_three_verifiers_and_no_stream() -> None:
    async with standing(seed=1, models=TABLES, dishonest=False, streams=9) as stand:
        async with load(stand, 9):
            async with asyncio.timeout(240):
                while stand.done.total() < 9:
                    await asyncio.sleep(0.05)
            died = {name: stand.services[name].process for name in stand.of("verifier")}
            await Failures(stand).poison()  # at both gateways, twice: refused, and verifiers died at the first one only
        codes = [process.poll() for process in died.values()]
        assert codes.count(-signal.SIGSEGV) == 2
        assert codes.count(None) == 1
        assert stand.broken == []  # every stream had the tokens of an undisturbed run
        assert NUM_TOKENS * stand.done.total() > 0
        assert stand.interrupted == 0
