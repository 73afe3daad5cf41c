"""Kernels have the same bits in the process that compiled them and in those that load them from the cache, with threads of oneTBB and of
OpenMP; torch keeps its threads.

A part that is not inlined is compiled twice: alone, and with the kernel that calls it. The process that compiles calls the first, one that
loads the kernel has the second only; where sums may be split among lanes the two differ. Then a verifier that started first gives other
texts than one that takes its sessions over.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from rootward.engine import cpu_kernels

PROGRAM = """
import hashlib
import numpy as np
from rootward.engine.cpu_kernels import VisibleKeys, attention_amx, attention_float32, has_amx

rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
length, group, dim = 203, 3, 64
keys, values, query, out = normal(208, 1, dim), normal(208, 1, dim), 3 * normal(1, group, dim), normal(1, group * dim)
index = lambda *numbers: np.array(numbers, dtype=np.int64)
blocks, sinks = np.arange(13, dtype=np.int64)[None], np.full(group, -np.inf, np.float32)
seen = VisibleKeys(index(0), index(0, 1), index(0), index(length - 1), blocks, 16, index(0, 1), index(length - 1))
attention_float32(query, keys, values, seen, dim**-0.5, 0.0, sinks, out, 1)
print(hashlib.sha256(out.tobytes()).hexdigest())
if has_amx():
    keys, values = ((of.view(np.uint32) >> 16).astype(np.int16) for of in (keys, values))
    attention_amx(query, keys, values, seen, dim**-0.5, 0.0, sinks, out, 1)
    print(hashlib.sha256(out.tobytes()).hexdigest())
"""

NETWORK = """
import hashlib
import torch
from rootward.engine import cpu_kernels
from transformers import LlamaConfig, LlamaForCausalLM
from rootward.engine.model import HuggingFaceModel
from rootward.ports import Rows

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
network = LlamaForCausalLM(LlamaConfig(vocab_size=90, num_hidden_layers=2, **sizes)).to(torch.bfloat16).eval()
model = HuggingFaceModel(network, name="small", max_slots=1, max_len=64)
assert model.llama is not None
logits = model.forward([Rows.chain(model.open(), 1, range(2, 49))])
print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
"""


# For a processor that this one need not be; nothing is run.
COMPILED_FOR_AMX = """
import llvmlite.binding
import numba

FEATURES = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512bf16 amx-tile amx-bf16".split()
llvmlite.binding.get_host_cpu_features = lambda: dict.fromkeys(FEATURES, True)
numba.config.CPU_NAME, numba.config.CPU_FEATURES = "sapphirerapids", ",".join(f"+{name}" for name in FEATURES)
from rootward.engine import cpu_decoder, cpu_kernels

index, number = numba.int64[::1], numba.float64
rows = {kind: kind[:, ::1] for kind in (numba.float32, numba.int16, numba.int32)}
pairs, floats, halves = rows[numba.int32], rows[numba.float32], rows[numba.int16]
cells = numba.int16[:, :, ::1]
cpu_kernels.linear_amx.compile((pairs, numba.int32[:, :, ::1], floats, floats, numba.intp))
named = lambda kind, *types: numba.types.NamedTuple(types, kind)
seen = named(cpu_kernels.VisibleKeys, index, index, index, index, numba.int64[:, ::1], numba.intp, index, index)
query, vector = numba.float32[:, :, ::1], numba.float32[::1]
cpu_kernels.attention_amx.compile((query, cells, cells, seen, number, number, vector, halves, numba.intp))
weights = (numba.int32[:, :, ::1], floats) * 4
like = named(cpu_decoder.LayerArrays, *weights, vector, vector, numba.none, cells, cells)
settings = named(cpu_decoder.LayerSettings, number, number, number, vector)
rows = named(cpu_decoder.LayerRows, floats, floats, index, index)
scratch = named(cpu_decoder.LayerScratch, *(halves, pairs) * 4, floats, query, floats, floats)
addresses = numba.from_dtype(cpu_decoder.ADDRESSES)[::1]
given = floats, numba.intp, numba.intp, addresses, like, settings, rows, seen, scratch, numba.boolean, index, query
cpu_decoder.decoder_layers.compile((*given, *[numba.boolean] * 5, numba.intp))
for kernel in (cpu_kernels.linear_amx, cpu_kernels.attention_amx, cpu_decoder.decoder_layers):
    (code,) = kernel.inspect_asm().values()
    print(code.count("tdpbf16ps") > 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_kernels_for_amx_compile_on_a_processor_without_it(tmp_path: Path) -> None:
    assert output_of(COMPILED_FOR_AMX, tmp_path).split() == ["True"] * 3


def test_a_compiled_kernel_and_a_cached_one_have_the_same_bits(tmp_path: Path) -> None:
    found = [output_of(PROGRAM, tmp_path) for _ in range(2)]
    kernels = 2 if cpu_kernels.has_amx() else 1
    assert len(list(tmp_path.rglob("*.nbc"))) == len(found[0].split()) == kernels
    assert found[0] == found[1]


def test_a_compiled_network_and_a_cached_one_have_the_same_bits(tmp_path: Path) -> None:
    compiled, cached, by_openmp = (output_of(NETWORK, tmp_path, layer) for layer in ("default", "default", "omp"))
    assert compiled == cached == by_openmp


FIRST_KERNEL = """
from rootward.engine import cpu_kernels
import numba
cpu_kernels.follow_torch_threads()
print(numba.threading_layer())
"""


@pytest.mark.skipif((platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no wheel of oneTBB")
def test_kernels_use_the_threads_of_onetbb_where_its_wheel_is_installed(tmp_path: Path) -> None:
    assert output_of(FIRST_KERNEL, tmp_path).split() == ["tbb"]


NOT_INSTALLED = """
import importlib.metadata as metadata
def files(name): raise metadata.PackageNotFoundError(name)
metadata.files = files
"""
NOT_LOADABLE = """
import ctypes
def load(library, *args, by=ctypes.CDLL.__init__, **kwargs):
    if "tbb" in str(args): raise OSError("cannot open shared object file")
    by(library, *args, **kwargs)
ctypes.CDLL.__init__ = load
"""


@pytest.mark.parametrize("broken", [NOT_LOADABLE, NOT_INSTALLED + NOT_LOADABLE], ids=["not loadable", "not installed"])
def test_kernels_use_openmp_without_onetbb(broken: str, tmp_path: Path) -> None:
    assert output_of(broken + FIRST_KERNEL, tmp_path).split() == ["omp"]


@pytest.mark.slow
def test_kernels_use_one_thread_without_onetbb_and_openmp(tmp_path: Path) -> None:
    missing = "import sys\nfor name in ('tbbpool', 'omppool'): sys.modules[f'numba.np.ufunc.{name}'] = None\n"
    with_threads = output_of(NETWORK, None)
    assert output_of(missing + NETWORK + "\nassert not cpu_kernels.HAS_THREADS", tmp_path) == with_threads


def output_of(program: str, cache: Path | None, threading_layer: str = "default") -> str:
    """Of a process with this folder for kernels (None: the user's, where most are compiled), and numba's threads of this kind."""
    environment = {**os.environ, "NUMBA_THREADING_LAYER": threading_layer}
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600).stdout


def test_the_first_kernel_leaves_torch_its_threads() -> None:
    """numba sets OpenMP to all processors as it begins; torch's loops would use them against `--num-threads`."""
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from rootward.engine.cpu_kernels import follow_torch_threads\n"
        "print(follow_torch_threads(), torch.get_num_threads())"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["1", "1"]
