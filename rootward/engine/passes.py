"""The two ways to run a network over placed rows: on KV trees in one forward, or without a cache, path by path.

`HuggingFaceModel` chooses one. The second is slow and correct for every causal model; it serves models that the load probe refuses.

Legend: T wanted rows, V vocabulary, B entries, Q rows of each (padded).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rootward.engine import tree_attention
from rootward.engine.atoms import reduced
from rootward.engine.attention import DenseView, Windows
from rootward.engine.batch import Step, split
from rootward.engine.graphs import Capture, Graphs, StaticStep
from rootward.engine.kv_cache import PagedCache, Running, running
from rootward.engine.kv_tree import Moves
from rootward.engine.layers import LlamaNetwork
from rootward.engine.slots import Entry, Size
from rootward.errors import ConfigurationError
from rootward.ports import Reduction

# Fixed cost of a forward, in rows: measured on a CPU; on an accelerator launches cost more than rows.
OVERHEAD_ROWS = {"cpu": 32}


class TreePass:
    """One forward over the KV trees of all entries, or two if long prompts and narrow trees are in one batch.

    capture  records steps, for CUDA graphs
    llama    computes the same as the network in fewer operations
    """

    def __init__(
        self,
        network: Any,
        size: Size,
        windows: Windows,
        *,
        capture: Capture | None = None,
        llama: LlamaNetwork | None = None,
    ):
        self.network, self.device, self.size, self.windows = network, network.device, size, windows
        self.kv, self.llama = PagedCache(size, windows.by_layer), llama
        self.reads_storage = network.config._attn_implementation in tree_attention.NAMES
        self.overhead = OVERHEAD_ROWS.get(self.device.type, 1024)
        self.graphs = None if capture is None else Graphs(self._forward, capture, size, self.device)
        self.can_slice = "logits_to_keep" in inspect.signature(network.forward).parameters
        self._exposed: tuple[int, ...] = ()
        self._hidden: tuple[torch.Tensor, ...] | None = None  # of the last forward of the network, by number
        self._states: dict[int, torch.Tensor] = {}  # exposed ones of the last run, by entry

    def expose(self, states: Sequence[int]) -> None:
        self._exposed = tuple(states)
        if self.llama is not None:
            self.llama.exposed = frozenset(states)

    @property
    def states(self) -> torch.Tensor:
        if self.llama is not None:
            return torch.from_numpy(np.concatenate([self.llama.states[i] for i in self._exposed], -1))
        return torch.cat([self._states[i] for i in range(len(self._states))])

    def run(self, entries: Sequence[Entry], kept: Sequence[range], reduction: Reduction | None = None) -> torch.Tensor:
        """Logits [T, V] of the wanted rows, in the order of the entries; or their reduction."""
        if self.llama is not None:
            step = Step(entries, kept, self.size, self.device, pad=False)
            return reduced(self.llama(step, self.kv.layers), reduction)
        self._states = {}
        parts = split([entry.plan.num_rows for entry in entries], self.overhead)
        if len(parts) == 1:
            logits = self._run(entries, kept, reduction)
            self._keep_states(parts[0], entries)
            return logits
        found: dict[int, torch.Tensor] = {}
        for part in parts:
            mine = [kept[i] for i in part]
            logits = self._run([entries[i] for i in part], mine)
            self._keep_states(part, entries)
            found.update(zip(part, torch.split(logits, list(map(len, mine))), strict=True))
        return reduced(torch.cat([found[i] for i in range(len(entries))]), reduction)

    def _keep_states(self, part: Sequence[int], entries: Sequence[Entry]) -> None:
        if self._exposed:
            if not self._hidden:
                raise ConfigurationError(f"head: {type(self.network).__name__} does not give its hidden states")
            states = torch.cat([self._hidden[i] for i in self._exposed], -1)
            for b, i in enumerate(part):
                self._states[i] = states[b, : entries[i].plan.num_rows]
            self._hidden = None

    def _run(self, entries: Sequence[Entry], kept: Sequence[range], reduction: Reduction | None = None) -> torch.Tensor:
        if self.graphs is not None and not self._exposed:  # a replay returns logits alone
            found = self.graphs.run(entries, kept, reduction)
            if found is not None:
                return found
        return reduced(self._logits(Step(entries, kept, self.size, self.device)), reduction)

    def _logits(self, step: Step) -> torch.Tensor:
        """[T, V] of the wanted rows, without a synchronisation."""
        if step.wanted is None:
            return self._forward(step).flatten(0, 1)
        if self.can_slice:
            keep, wanted = step.logits_to_keep()
            return self._forward(step, logits_to_keep=keep).flatten(0, 1).index_select(0, wanted)
        return self._forward(step).flatten(0, 1).index_select(0, step.wanted)

    def _forward(self, step: Step | StaticStep, **kwargs: Any) -> torch.Tensor:
        """Logits [B, Q, V], or of fewer rows by `logits_to_keep`."""
        view = None if self.reads_storage else DenseView(step.paged)
        # If attention reads the storage, the mask is empty: without one transformers would build its own.
        none = torch.empty(1, 1, 1, 0, device=self.device)
        if self._exposed:
            kwargs["output_hidden_states"] = list(self._exposed)  # early transformers 5 takes it for a yes
        token = running.set(Running(step, view))
        try:
            out = self.network(
                input_ids=step.ids,
                position_ids=step.positions,
                attention_mask=self.windows.masks(
                    lambda window: none if view is None else view.mask(window, self.network.dtype)
                ),
                past_key_values=self.kv.cache,
                use_cache=True,
                **kwargs,
            )
        finally:
            running.reset(token)
        self._hidden = out.hidden_states if self._exposed else None
        logits: torch.Tensor = out.logits
        return logits

    def move(self, moves: Moves) -> None:
        self.kv.move(moves, self.device)


class PathPass:
    """A cache-free forward over the whole text per leaf: correct whatever the network computes. Cells hold tokens instead of keys and
    values."""

    def __init__(self, network: Any, size: Size):
        self.network, self.device = network, network.device
        self.token = np.zeros(size.storage, dtype=np.int64)

    def run(self, entries: Sequence[Entry], kept: Sequence[range], reduction: Reduction | None = None) -> torch.Tensor:
        wanted = []
        for entry, keep in zip(entries, kept, strict=True):
            self.token[entry.table.cells(entry.plan.cells)] = entry.rows.token
            by_row = self._rows(entry, set(keep))
            wanted += [by_row[row] for row in keep]
        return reduced(torch.stack(wanted), reduction)

    def _rows(self, entry: Entry, missing: set[int]) -> dict[int, torch.Tensor]:
        """Logits [V] by new row. One forward over a path gives those of all wanted rows on it."""
        plan = entry.plan
        old = len(plan.scratch) - plan.num_rows
        found: dict[int, torch.Tensor] = {}
        while missing:
            last = max(missing)
            ids = torch.from_numpy(self.token[entry.cells_seen(last)][None]).to(self.device)
            logits = self.network(input_ids=ids, use_cache=False).logits[0]
            for i, row in enumerate((entry.path(last) - old).tolist()):
                if row in missing:
                    found[row] = logits[plan.length + i]
                    missing.discard(row)
        return found

    def move(self, moves: Moves) -> None:
        self.token[moves.target] = self.token[moves.source]

    def expose(self, states: Sequence[int]) -> None:
        """No effect: a model without trees has no drafts, so no states are read."""

    @property
    def states(self) -> torch.Tensor:
        raise RuntimeError("states: a network that is run path by path exposes none")


ForwardPass = TreePass | PathPass
