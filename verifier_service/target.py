"""The target model of a verifier, in this process or split over several (`--tensor-parallel`)."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rootward.engine.loading import load_model
from rootward.engine.threads import on_passing_thread, use_threads
from rootward.errors import ConfigurationError
from rootward.ports import LanguageModel
from verifier_service.settings import VerifierSettings

if TYPE_CHECKING:
    from rootward.engine.head_model import DraftHead
    from rootward.engine.parallel import Group, Nodes


def load_target(settings: VerifierSettings, group: Group | None = None) -> Any:
    """The model that the settings describe. group: tensor-parallel ranks, each of which must call this."""
    use_threads(settings.num_threads)
    return load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_slots=settings.max_num_seqs,
        max_len=settings.max_model_len,
        kv_cache_tokens=settings.kv_cache_tokens,
        adapter=settings.target_adapter,
        quantization=settings.quantization,
        cuda_graphs=settings.cuda_graphs,
        group=group,
    )


def load_local_head(settings: VerifierSettings, model: Any) -> DraftHead | None:
    """The draft head of `--local-draft head:FOLDER` or `--draft-head FOLDER`, None for other settings. It is loaded whole even where it
    only fuses features: which states it reads is found by drafting with it. ConfigurationError if it does not fit the target."""
    from rootward.engine.head_growth import compile_growth
    from rootward.engine.head_loading import load_head_model
    from rootward.engine.model import HuggingFaceModel

    if not (folder := settings.head_folder) or not model.info.supports_trees:
        return None
    if not isinstance(model, HuggingFaceModel) or settings.tensor_parallel > 1:
        raise ConfigurationError(
            f"draft head: {folder!r} needs a Hugging Face target and tensor_parallel 1; leave local_draft and draft_head out"
        )
    slots = settings.max_num_seqs if settings.grows_head else 1
    head = load_head_model(folder, model, max_slots=slots, max_depth=settings.max_depth)
    if settings.grows_head:
        compile_growth(head)
    return head


@asynccontextmanager
async def target_model(settings: VerifierSettings) -> AsyncIterator[tuple[LanguageModel, asyncio.Future[None]]]:
    """(the model, a future that completes if a tensor-parallel process dies)."""
    if settings.tensor_parallel == 1:
        yield await on_passing_thread(load_target, settings), asyncio.get_running_loop().create_future()
        return
    from rootward.engine.ranks import Ranks

    start = partial(
        Ranks.start, settings.tensor_parallel, partial(load_target, settings), settings.device, nodes_of(settings)
    )
    with await asyncio.to_thread(start) as ranks:
        lost = asyncio.wrap_future(ranks.lost)
        yield await on_passing_thread(load_target, settings, ranks.group), lost


async def follow_target(settings: VerifierSettings, loaded: Callable[[], None]) -> None:
    """Compute for the verifier of the first machine until it ends: a signal waits for that, a second one does not. `loaded` is called once
    this machine has its part of the model."""
    from rootward.engine.ranks import Followers

    followers = Followers(settings.tensor_parallel, partial(load_target, settings), settings.device, nodes_of(settings))
    signals = itertools.count()

    def stop() -> None:
        if next(signals) > 0:
            followers.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await asyncio.to_thread(followers.wait, lambda: loop.call_soon_threadsafe(loaded))


def nodes_of(settings: VerifierSettings) -> Nodes:
    from rootward.engine.parallel import Nodes

    return Nodes(settings.nnodes, settings.node_rank, settings.master_addr, settings.master_port)
