"""CPU threads of this process's model."""

from __future__ import annotations

import torch


def use_threads(num_threads: int) -> None:
    """Processes on one machine share its cores: give each a part, or they fight for the memory bus."""
    torch.set_num_threads(num_threads)
