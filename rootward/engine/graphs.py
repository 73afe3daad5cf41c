"""Recorded steps (CUDA graphs): the forward of a bucket and the reduction of its rows are recorded once over static buffers, and replayed
for every step of that bucket.

A step in eager mode is hundreds of launches from Python; recorded, it is one. The buffers hold the inputs that differ between replays:
tokens, positions, cells, block tables, lengths, visibility. A bucket is given by all sizes, rounded up to powers of two. Padding rows and
entries write to the trash cell. Two or three host-to-device copies fill the buffers, without a synchronisation.

A bucket runs eagerly the first time, since many occur once, and is recorded the second time. At most `MAX_GRAPHS` are kept; then a new one
replaces the least recently used one if that was unused for `IDLE_STEPS` steps, at most once in `STEPS_BETWEEN` steps, because recording
takes as long as many steps. Prompts and steps above `MAX_ROWS` rows are not recorded, since their launches cost relatively little. Networks
that cannot be recorded (for example mixtures of experts that read their routing on the host) run eagerly.

Legend: B entries, Q rows of each (padded), R wanted rows (padded), V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rootward.core.arrays import Ints
from rootward.engine.atoms import reduced
from rootward.engine.batch import flat_rows, packed_rows
from rootward.engine.cpu_kernels import VisibleKeys
from rootward.engine.paged import Extents, packed_context, unpacked_context
from rootward.engine.slots import Entry, Size
from rootward.errors import first_line
from rootward.ports import Reduction

log = logging.getLogger(__name__)

MAX_ROWS = 512
MIN_BLOCKS = 16  # shorter prefixes are not faster
MIN_NODES = 32  # one word of visibility, half a tile of the kernel
MAX_GRAPHS = 128
IDLE_STEPS = 1000
STEPS_BETWEEN = 250
MAX_DROPPED = 16  # rows of an entry without wanted logits: some committed tokens of a drafter's tree, but no prompt
Run = Callable[[], torch.Tensor]
Capture = Callable[
    [Run], Run
]  # records the launches of a function; the result replays them and returns the same tensor, with new content


class CudaCapture:
    """CUDA graphs that share a memory pool: one of them runs at a time. Recording and replay must be on the same thread."""

    def __init__(self, device: torch.device | str) -> None:
        self._device, self._pool = torch.device(device), torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):  # launches on another device would not be recorded
            torch.cuda.synchronize()
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    out = run()
            except BaseException:
                torch.cuda.set_stream(before)  # after a failure torch leaves the stream of the recording current
                raise

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class Bucket(NamedTuple):
    """Key of a recording. `num_rows`, `kind`: number of rows and static part of the reduction."""

    extents: Extents
    num_rows: int = 0
    kind: Hashable = None


class StaticStep:
    """The static buffers of a bucket, with the interface of `Step`."""

    def __init__(self, extents: Extents, size: Size, device: torch.device):
        self.extents, self.size, self.device = extents, size, device
        self._rows = torch.zeros(3, extents.entries, extents.rows, dtype=torch.int64, device=device)
        self._context = torch.zeros(extents.total, dtype=torch.int32, device=device)
        self.ids, self.positions, write = self._rows.unbind(0)
        self.write = write.reshape(-1)
        self.paged = unpacked_context(self._context, extents, size.block_size, extents.blocks * size.block_size)

    def fill(self, entries: Sequence[Entry]) -> None:
        rows = packed_rows(entries, self.extents.entries, self.extents.rows, self.size)
        self._rows.copy_(torch.from_numpy(rows), non_blocking=True)
        context = packed_context(entries, self.extents, self.size.storage)
        self._context.copy_(torch.from_numpy(context), non_blocking=True)

    def visible(self, window: int | None) -> VisibleKeys:
        raise RuntimeError("attention on the CPU cannot be recorded")


@dataclass(slots=True)
class Recorded:
    """A recorded step.

    numbers  float64[R, 1 + n]: indices of the wanted rows, and their rows of the reduction's table
    used     number of the step of the last replay
    """

    static: StaticStep
    replay: Run
    numbers: torch.Tensor | None
    used: int = 0

    def of(self, entries: Sequence[Entry], wanted: Ints, reduction: Reduction | None) -> torch.Tensor:
        """Logits [T, V] of the wanted rows, or their reduction. A copy, since the next replay overwrites the output."""
        self.static.fill(entries)
        if reduction is None:
            index = torch.from_numpy(wanted).to(self.static.device, non_blocking=True)
            return self.replay().flatten(0, 1).index_select(0, index)
        assert self.numbers is not None
        numbers = np.column_stack([wanted, reduction.table])
        # further rows keep earlier numbers; their results are not used
        self.numbers[: len(numbers)].copy_(torch.from_numpy(numbers), non_blocking=True)
        return self.replay()[: len(wanted)].clone()


class Graphs:
    """Recorded forwards and reductions by bucket. `forward` runs the network over the buffers of a bucket: [B, Q, V]."""

    def __init__(
        self, forward: Callable[[StaticStep], torch.Tensor], capture: Capture, size: Size, device: torch.device
    ):
        self._forward, self._capture, self._size, self._device = forward, capture, size, device
        self._seen: set[Bucket] = set()
        self._recorded: dict[Bucket, Recorded] = {}  # least recently used first
        self._room_made = -STEPS_BETWEEN  # step of the last replacement
        self._refused: set[Hashable] = set()  # kinds that cannot be recorded, buckets that ran out of memory
        self.num_replayed = self.num_other = 0

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def _step(self) -> int:
        return self.num_replayed + self.num_other

    def run(
        self, entries: Sequence[Entry], kept: Sequence[range], reduction: Reduction | None = None
    ) -> torch.Tensor | None:
        """Logits [T, V] of the wanted rows, or their reduction; None if the step is not recorded."""
        if reduction is not None and reduction.kind in self._refused:
            found = self.run(entries, kept)
            return None if found is None else reduced(found, reduction)
        extents = bucket_of(entries)
        wanted = flat_rows(kept, [b * extents.rows for b in range(len(entries))])
        num_rows = extents.entries if len(wanted) <= extents.entries else extents.entries * extents.rows
        bucket = Bucket(extents) if reduction is None else Bucket(extents, num_rows, reduction.kind)
        dropped = max(entry.plan.num_rows - len(rows) for entry, rows in zip(entries, kept, strict=True))
        if dropped > MAX_DROPPED or (bucket not in self._recorded and not self._record(bucket, reduction)):
            self.num_other += 1
            return None
        self.num_replayed += 1
        self._recorded[bucket] = recorded = self._recorded.pop(bucket)
        recorded.used = self._step
        return recorded.of(entries, wanted, reduction)

    def _record(self, bucket: Bucket, reduction: Reduction | None) -> bool:
        """Record a bucket; False if it is not recorded now."""
        rows = bucket.extents.entries * bucket.extents.rows
        if rows > MAX_ROWS or not self._refused.isdisjoint((bucket, bucket.kind)):
            return False
        if bucket not in self._seen:
            self._seen.add(bucket)
            return False
        if not self._make_room():
            return False
        static = StaticStep(bucket.extents, self._size, self._device)
        static.fill([])
        try:
            self._recorded[bucket] = self._recording(static, bucket, reduction)
        except RuntimeError as wrong:
            cause = (
                wrong.__context__ or wrong
            )  # the end of a recording that failed raises an error of its own, which says nothing
            log.warning("steps are not recorded: %s", first_line(cause))
            self._refused.add(bucket if isinstance(cause, torch.OutOfMemoryError) else bucket.kind)
        return bucket in self._recorded

    def _make_room(self) -> bool:
        """Drop a recording if there are too many; False if none may be dropped."""
        if len(self) < MAX_GRAPHS:
            return True
        oldest = next(iter(self._recorded))
        if self._step - self._recorded[oldest].used < IDLE_STEPS or self._step - self._room_made < STEPS_BETWEEN:
            return False
        self._room_made = self._step
        del self._recorded[oldest]
        self._seen.discard(oldest)
        return True

    def _recording(self, static: StaticStep, bucket: Bucket, reduction: Reduction | None) -> Recorded:
        numbers: torch.Tensor | None = None
        run: Run = partial(self._forward, static)
        if reduction is not None:
            padding = np.resize(np.append(0.0, reduction.table[0]), (bucket.num_rows, 1 + reduction.table.shape[1]))
            numbers = torch.from_numpy(padding).to(self._device)
            run = partial(self._reduced, static, numbers, reduction)
        run()  # compiles kernels for this shape and grows their buffers
        return Recorded(static, self._capture(run), numbers)

    def _reduced(self, static: StaticStep, numbers: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        wanted = numbers[:, 0].long()
        return reduction.of(self._forward(static).flatten(0, 1).index_select(0, wanted), numbers[:, 1:])


def bucket_of(entries: Sequence[Entry]) -> Extents:
    """The sizes of a step, rounded up to powers of two."""
    own = Extents.of(entries, max(entry.plan.num_rows for entry in entries))
    return Extents(_up(own.entries), _up(own.rows), max(MIN_BLOCKS, _up(own.blocks)), max(MIN_NODES, _up(own.nodes)))


def _up(num: int) -> int:
    return 1 << (num - 1).bit_length()
