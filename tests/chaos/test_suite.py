"""Short forms of `make chaos` and `make soak` (`chaos.suite`)."""

from __future__ import annotations

import pytest
from chaos.suite import run, with_a_head

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]


async def test_a_short_chaos_keeps_every_promise(tmp_path) -> None:
    stand = await run("chaos", minutes=0.5, streams=6, seed=3, folder=tmp_path)
    assert stand.broken == []
    assert stand.events
    assert min(stand.done[kind] for kind in ("coupled", "greedy", "traversal")) > 0
    assert "Every promise was kept." in (tmp_path / "chaos.md").read_text(encoding="utf-8")


@pytest.mark.long
async def test_chaos_with_draft_heads_in_the_drafters_keeps_every_promise(tmp_path) -> None:
    stand = await run("chaos", minutes=3, streams=6, seed=11, folder=tmp_path, models=with_a_head(tmp_path))
    assert stand.broken == []
    assert min(stand.done[kind] for kind in ("coupled", "greedy", "traversal")) > 0


async def test_a_short_soak_gives_everything_back(tmp_path) -> None:
    stand = await run("soak", minutes=0.3, streams=20, seed=3, folder=tmp_path)
    assert stand.broken == []
    assert stand.done.total() > 20
    assert (tmp_path / "soak.png").stat().st_size > 0
