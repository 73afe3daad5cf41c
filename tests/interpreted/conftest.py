"""Kernel tests run where kernels can: on a GPU, or under triton's interpreter in a process of its own.

triton reads TRITON_INTERPRET once, when it is first imported, and from then on every kernel of the process is interpreted. So
nothing sets it here: `unit/engine/test_triton_attention.py` runs this folder in a process that has it, and no other test is
touched. In a process that has neither the variable nor a GPU the tests are skipped. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/interpreted
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_runtest_setup() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("there is no GPU; set TRITON_INTERPRET=1 to interpret the kernels")
