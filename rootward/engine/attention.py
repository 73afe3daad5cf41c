"""What each new row sees: the additive attention mask of a step, built on the device from a few small arrays.

A row sees the committed cells of its slot, its ancestors' cells and its own. Under a sliding window it sees only those
fewer than W *logical* positions behind it; cells are in no order. Masks are additive (0 or the dtype's minimum): eager
attention adds them to the scores, and sdpa would turn a boolean mask into this one anyway, once per layer.

Legend: B entries of the step, Q rows of each (padded), P scratch cells of all entries, KV cells looked at per slot.
"""

from __future__ import annotations

from typing import Any

import torch

from rootward.engine.batch import Step
from rootward.engine.kv_tree import Ints

Windows = dict[str, int | None]  # layer type -> sliding window; one entry "" where the model takes a single mask
Mask = torch.Tensor | dict[str, torch.Tensor]

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: Any) -> Windows | None:
    """The windows by layer type of a model's text configuration; None if it has layers of another kind."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = set(getattr(config, "layer_types", None) or ())
    if not types:
        return {"": window}
    if not types <= {FULL, SLIDING}:
        return None
    by_type = {FULL: None, SLIDING: window}
    if len(types) == 1:
        return {"": by_type[types.pop()]}
    return by_type


class Visibility:
    """Which cells are committed, and where tokens stand. Lives on the device; a step updates what it changes."""

    def __init__(self, num_slots: int, num_cells: int, windows: Windows, dtype: torch.dtype, device: torch.device):
        self.windows = windows
        self.hidden = torch.finfo(dtype).min
        self.bias = torch.full((num_slots, num_cells), self.hidden, dtype=dtype, device=device)  # 0 where committed
        self.position = torch.zeros((num_slots, num_cells), dtype=torch.int64, device=device)
        self._zero = torch.tensor(0.0, dtype=dtype, device=device)
        self._min = torch.tensor(self.hidden, dtype=dtype, device=device)

    def commit(self, slot: int, cells: Ints) -> None:
        self.bias[slot].index_fill_(0, torch.from_numpy(cells).to(self.bias.device), 0.0)

    def clear(self, slot: int) -> None:
        self.bias[slot].fill_(self.hidden)

    def mask(self, step: Step) -> Mask:
        """[B, 1, Q, KV], or one such tensor per layer type."""
        full = self._full(step)
        if not any(self.windows.values()):
            return full[:, None] if "" in self.windows else dict.fromkeys(self.windows, full[:, None])
        cells = step.owner, step.scratch
        self.position[step.slot_ids[cells[0]], cells[1]] = step.scratch_position
        masks = {kind: self._windowed(full, step, window)[:, None] for kind, window in self.windows.items()}
        return masks.get("", masks)

    def _full(self, step: Step) -> torch.Tensor:
        """[B, Q, KV]: committed cells for everybody, scratch cells for those who descend from them."""
        width = step.ids.shape[1]
        mask = step.select(self.bias)[:, None, :].repeat(1, width, 1)
        sees = torch.where(step.sees, self._zero, self._min)
        if len(step.slots) == 1:
            mask[0].t().index_copy_(0, step.scratch, sees)
        else:
            mask.transpose(1, 2)[step.owner, step.scratch] = sees
        return mask

    def _windowed(self, full: torch.Tensor, step: Step, window: int | None) -> torch.Tensor:
        if window is None or step.max_position < window:
            return full
        distance = step.positions[:, :, None] - step.select(self.position)[:, None, :]
        return full.masked_fill(distance >= window, self.hidden)
