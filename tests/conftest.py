"""One thread per process: tests start several, and threads of different processes that fight for two cores slow one another down."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
