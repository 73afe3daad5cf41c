"""Kernel tests run where kernels can: on a GPU, or under triton's interpreter in a process of its own.

triton reads TRITON_INTERPRET once, when it is first imported, and from then on every kernel of the process is interpreted. So
nothing sets it here: `unit/engine/test_triton_attention.py` runs this folder in a process that has it, and no other test is
touched. In a process that has neither the variable nor a GPU this folder is empty. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/interpreted
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

CAN_RUN = find_spec("triton") is not None and (os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available())
collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]
