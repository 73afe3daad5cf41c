"""How services run: on uvloop, and with what was loaded at start out of the collector's way."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator

import pytest
import uvloop

from rootward.errors import ConfigurationError
from rootward.wire.process import announce, run_service


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A service that has ended ignores SIGTERM; this process should not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_service_runs_on_uvloop() -> None:
    loops = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())

    assert run_service("test", main) == 0
    assert isinstance(loops[0], uvloop.Loop)


def test_a_mistake_of_the_operator_is_one_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        raise ConfigurationError("listen: 'x' is wrong; say y")

    assert run_service("test", main) == ConfigurationError("").exit_code
    assert capsys.readouterr().err == "rootward test: listen: 'x' is wrong; say y\n"


def test_collections_do_not_look_at_what_was_there_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_freeze_count()
    try:
        announce("test", "127.0.0.1:1")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
    assert capsys.readouterr().out == "rootward test listening on 127.0.0.1:1\n"
