"""Work that a cancellation does not interrupt, since another process may have done it without the caller knowing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def uncancelled(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None) -> T:
    """The result of `work`, whose time is bounded. If the caller is cancelled meanwhile, `work` ends all the same, `undo` gives back what
    it took, and then the caller is cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None and undo is not None:
            await undo(task.result())
        raise
