"""The Triton kernels where there is no GPU: interpreted in a process of their own, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rootward.engine.triton_attention import MIN_PIECE, Plan, is_available, make_plan

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed; it exists for Linux only"
)
H200_SMS = 132


@needs_triton
@pytest.mark.timeout(1800)
def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    """triton decides at its import whether kernels are interpreted: hence the process (see interpreted/conftest.py)."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "interpreted")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > 80


@needs_triton
def test_without_the_interpreter_and_a_gpu_tests_of_kernels_are_skipped_also_by_name() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    named = [
        "test_engine_on_the_kernel.py",
        "test_triton_mutants.py",
        "test_triton_against_reference.py::test_block_sizes",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(ROOT / "tests" / "interpreted" / name) for name in named)],
        cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ skipped(, \d+ deselected)? in", done.stdout, re.MULTILINE), done.stdout[-8000:]
    assert "there is no GPU; set TRITON_INTERPRET=1" in done.stdout


def test_the_engine_loads_without_triton() -> None:
    """Modules that mention the kernels load; only a call needs triton."""
    code = (
        "import sys; sys.modules['triton'] = None; import rootward.engine.model, torch;"
        "from rootward.engine import triton_attention; assert not triton_attention.is_available(torch.device('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_cpu_has_no_kernels() -> None:
    assert not is_available(torch.device("cpu"))


def test_pieces_fill_the_device_and_no_more() -> None:
    """8 B shape: 8 KV heads, groups of 4."""

    def programs(num: int, width: int, length: int) -> tuple[Plan, int]:
        plan = make_plan(4 * width, 8 * num, 128, 2, length, H200_SMS)
        return plan, -(-4 * width // plan.tile_rows) * 8 * num * plan.num_pieces

    alone, num_alone = programs(1, 1, 8192)
    assert H200_SMS <= num_alone <= 4 * H200_SMS
    assert alone.tile_rows == 16
    full, num_full = programs(32, 1, 8192)
    assert 2 * H200_SMS <= num_full <= 4 * H200_SMS
    assert full.num_pieces == 2
    wide, _ = programs(1, 32, 8192)
    assert wide.tile_rows == 128
    assert programs(1, 1, 3 * MIN_PIECE)[0].num_pieces == 3
    assert programs(1, 1, 0)[0].num_pieces == 0


# (type, D, D_v, R, options) at compute capability; the last column is that GPU's shared memory per program in bytes
GPUS = {80: 163 << 10, 90: 227 << 10}
SHAPES = [
    ("bf16", 128, 128, 4, {}),
    ("bf16", 128, 128, 128, {"WINDOWED": True, "CAPPED": True}),
    ("fp16", 80, 80, 64, {"WINDOWED": True}),
    ("bf16", 256, 256, 32, {"CAPPED": True}),
    ("bf16", 192, 128, 1, {}),
    ("fp32", 64, 64, 16, {"WINDOWED": True, "CAPPED": True}),
]


@needs_triton
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("kind", "dim", "dim_v", "rows", "options"), SHAPES)
def test_kernels_compile(
    capability: int,
    kind: str,
    dim: int,
    dim_v: int,
    rows: int,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Down to machine code: the interpreter accepts what the compiler does not, and does not know how much memory there is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rootward.engine import triton_kernels as kernels
    from rootward.engine.triton_attention import _tile

    plan = make_plan(rows, 8, max(dim, dim_v), 4 if kind == "fp32" else 2, 2048, H200_SMS)
    shape = {"GROUP": 4, "KV_HEADS": 2, "DIM_V": dim_v, "TILE_DV": _tile(dim_v)}
    tiles = {"TILE_R": plan.tile_rows, "TILE_N": plan.tile_cells, "TILE_D": _tile(dim)}
    switches = {"CAPPED": False, "WINDOWED": False} | options
    constants = {**shape, **tiles, **switches, "DIM": dim, "BLOCK_SIZE": 16}
    launch = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    attend = compiled(kernels.partial_attention, kind, constants, capability, launch)
    assert attend.metadata.shared <= GPUS[capability]
    assert "cp.async" in attend.asm["ptx"]  # reads of keys and values overlap the products
    if kind != "fp32":
        assert re.search(r"mma\.sync|wgmma", attend.asm["ptx"])  # products run on tensor cores
    constants = {**shape, "TILE_P": 16, "SINKS": True}
    assert compiled(kernels.merge_partials, kind, constants, capability, {"num_warps": 4}).asm["cubin"]


POINTERS = ("query", "keys", "values", "out", "sinks")
FLOATS, INTS = ("partial", "lse"), ("block_table", "length", "scratch", "scratch_position", "sees", "position")


def compiled(kernel: Any, kind: str, constants: dict[str, Any], capability: int, launch: dict[str, int]) -> Any:
    """The kernel for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(POINTERS, f"*{kind}") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTS, "*i32")
    kinds |= {"scale": "fp32", "cap": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = [name.startswith(("query_", "key_", "value_")) or kinds.get(name, "")[:1] == "*" for name in signature]
    attributes = {(i,): [["tt.divisibility", 16]] for i, is_aligned in enumerate(aligned) if is_aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
