"""CPU threads of this process's model.

torch's OpenMP keeps a team of threads for every thread that has computed anything, as long as that thread lives, and with more of them
than processors each waits longer for the others (docs/log.md). So all computation with several threads is called from the same thread, or
from one that ends with the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from rootward.host import available_cores

P = ParamSpec("P")
T = TypeVar("T")


def use_threads(num_threads: int | None) -> None:
    """None: all cores that this process may use. Processes on one machine share its cores: give each a part, or they fight for the memory
    bus."""
    torch.set_num_threads(num_threads or available_cores())


async def on_passing_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call, on a thread of its own that ends with it, as does its team."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="passing")
    try:
        return await asyncio.wrap_future(thread.submit(call, *args, **kwargs))
    finally:
        thread.shutdown(wait=False)
