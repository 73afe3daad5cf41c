"""Steps as graphs: the forward of a bucket is recorded once over buffers that never move, and replayed for every step that fits.

A step in eager mode is hundreds of launches from Python; recorded, it is one. What may differ between two replays lies in the buffers:
tokens, positions, cells, block tables, lengths, visibility. All else is the bucket: sizes rounded up to powers of two. Rows and entries of
padding write to the trash cell. Two host-to-device copies fill the buffers; nothing in between asks the device for a value.

A bucket runs unrecorded the first time (many come once) and is recorded the second time. Prefill and steps beyond `MAX_ROWS` are not
recorded: there the launches do not count. What cannot be recorded (experts that look at their routing, say) stays as it is.

Legend: B entries, Q rows of each (padded), V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from rootward.engine.batch import packed_rows
from rootward.engine.paged import Extents, packed_context, seen_in
from rootward.engine.reach import Reach
from rootward.engine.slots import Entry, Size

log = logging.getLogger(__name__)

MAX_ROWS = 512
MIN_BLOCKS = 16  # below, shorter prefixes save nothing
MAX_GRAPHS = 64
Run = Callable[[], torch.Tensor]


class Capture(Protocol):
    """Records what `run` launches; returns what launches it again and gives the same tensor, with new content."""

    def __call__(self, run: Run) -> Run: ...


class CudaCapture:
    """CUDA graphs out of one memory pool: only one of them runs at a time. The thread that records must be the one that runs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class StaticStep:
    """The buffers of a bucket; for the network they are a `Step`."""

    def __init__(self, extents: Extents, size: Size, device: torch.device):
        self.extents, self.size, self.device = extents, size, device
        self._rows = torch.zeros(3, extents.entries, extents.rows, dtype=torch.int64, device=device)
        self._context = torch.zeros(extents.total, dtype=torch.int32, device=device)
        self.ids, self.positions, write = self._rows.unbind(0)
        self.write = write.reshape(-1)
        self.paged = seen_in(self._context, extents, size.block_size, extents.blocks * size.block_size)

    def fill(self, entries: Sequence[Entry]) -> None:
        rows = packed_rows(entries, self.extents.entries, self.extents.rows, self.size)
        self._rows.copy_(torch.from_numpy(rows), non_blocking=True)
        self._context.copy_(
            torch.from_numpy(packed_context(entries, self.extents, self.size.storage)), non_blocking=True
        )

    def reach(self, window: int | None) -> Reach:
        raise RuntimeError("a recorded step has no reach: attention on the CPU cannot be recorded")


class Graphs:
    """Recorded forwards by bucket. `forward` runs the network over the buffers of one: logits [B, Q, V]."""

    def __init__(
        self, forward: Callable[[StaticStep], torch.Tensor], capture: Capture, size: Size, device: torch.device
    ):
        self._forward, self._capture, self._size, self._device = forward, capture, size, device
        self._seen: set[Extents] = set()
        self._recorded: dict[Extents, tuple[StaticStep, Run]] = {}
        self._can_record = True
        self.num_replayed = self.num_other = 0

    def __len__(self) -> int:
        return len(self._recorded)

    def logits(self, entries: Sequence[Entry], kept: Sequence[range]) -> torch.Tensor | None:
        """[T, V] of the wanted rows; None if this step is none that is recorded."""
        bucket = bucket_of(entries)
        prefill = any(len(rows) < entry.plan.num_rows for entry, rows in zip(entries, kept, strict=True))
        if prefill or (bucket not in self._recorded and not self._record(bucket)):
            self.num_other += 1
            return None
        static, replay = self._recorded[bucket]
        static.fill(entries)
        self.num_replayed += 1
        wanted = np.concatenate([b * bucket.rows + np.asarray(rows) for b, rows in enumerate(kept)])
        index = torch.from_numpy(wanted).to(self._device, non_blocking=True)
        return replay().flatten(0, 1).index_select(0, index)  # a copy: the next replay writes to the same place

    def _record(self, bucket: Extents) -> bool:
        """Whether this bucket has been recorded now."""
        if not self._can_record or bucket.entries * bucket.rows > MAX_ROWS or len(self) >= MAX_GRAPHS:
            return False
        if bucket not in self._seen:
            self._seen.add(bucket)
            return False
        static = StaticStep(bucket, self._size, self._device)
        static.fill([])
        try:
            self._forward(static)  # kernels of this very shape are compiled, their buffers grown
            self._recorded[bucket] = static, self._capture(lambda: self._forward(static))
        except RuntimeError as wrong:
            log.warning("steps are not recorded: %s", str(wrong).splitlines()[0])
            self._can_record = False
        return bucket in self._recorded


def bucket_of(entries: Sequence[Entry]) -> Extents:
    """The sizes of a step, rounded up to powers of two."""
    own = Extents.of(entries, max(entry.plan.num_rows for entry in entries))
    return Extents(_up(own.entries), _up(own.rows), max(MIN_BLOCKS, _up(own.blocks)), _up(own.nodes))


def _up(num: int) -> int:
    return 1 << (num - 1).bit_length()
