"""Checks of this machine."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rootward.doctor import Finding, graded
from rootward.host import available_cores, thread_variables

GIB = 1 << 30
LEAST_MEMORY = 2 * GIB  # that a service with a small model needs
LITTLE_MEMORY = 4 * GIB
LEAST_DESCRIPTORS = 1024  # a gateway takes two for each client, one for each stream
FEW_DESCRIPTORS = 8192
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # of the products of kernels, fastest first
BUSY = 1.5  # processes that want to run, for each core


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: that this process may use, of all_cores. threads: variables of the environment. memory: available bytes. load: processes that
    want to run, mean of a minute. torch: version, "" without it. gpus: names that torch sees; has_gpu: the system has the driver of one."""

    cores: int
    all_cores: int
    load: float
    memory: int
    flags: frozenset[str]
    descriptors: int
    threads: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""
    gpus: tuple[str, ...] = ()
    has_gpu: bool = False


def look() -> Machine:
    """The facts of this machine. Imports torch if it is installed."""
    torch_version, gpus = _torch_and_gpus()
    return Machine(
        cores=available_cores(),
        all_cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        memory=_available_memory(),
        flags=frozenset(_found(r"^(?:flags|Features)\s*:(.*)$", "/proc/cpuinfo").split()),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        threads=thread_variables(),
        torch=torch_version,
        gpus=gpus,
        has_gpu=Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists(),
    )


def judge(machine: Machine) -> list[Finding]:
    checks = (_cores, _threads, _memory, _processor, _torch, _descriptors)
    return [check(machine) for check in checks]


def _cores(machine: Machine) -> Finding:
    found = f"{machine.cores} of {machine.all_cores} usable, load {machine.load:.1f}"
    few = machine.cores < 2
    advice = "other processes take the cores; stop them, or measure later: step times will be wrong"
    if few:
        advice = "a gateway and a model share one core; give the container or the virtual machine at least 2"
    return graded("cores", found, advice, warning=few or machine.load > BUSY * machine.cores)


def _threads(machine: Machine) -> Finding:
    found = ", ".join(f"{name}={value}" for name, value in machine.threads.items()) or "no limits in the environment"
    numbers = {name: int(value) for name, value in machine.threads.items() if value.isdecimal()}
    advice = ""
    if more := [name for name, value in numbers.items() if value > machine.cores]:
        advice = f"{more[0]} exceeds the {machine.cores} cores, threads will wait for one another; unset it"
    elif fewer := [name for name, value in numbers.items() if value < machine.cores]:
        advice = f"{fewer[0]} is below the {machine.cores} cores; unset it, and give each service its --num-threads"
    return graded("threads", found, advice, warning=bool(advice))


def _memory(machine: Machine) -> Finding:
    too_little = machine.memory < LEAST_MEMORY
    advice = "enough for small models only; bound KV memory with --kv-cache-tokens (docs/models.md)"
    if too_little:
        advice = "too little for a model and its KV cache; free some, or use a larger machine"
    found = f"{machine.memory / GIB:.1f} GiB available"
    return graded("memory", found, advice, problem=too_little, warning=machine.memory < LITTLE_MEMORY)


def _processor(machine: Machine) -> Finding:
    known = [name for name in INSTRUCTIONS if name in machine.flags]
    advice = "no bfloat16 arithmetic: a tree of many nodes costs more than on a processor with AMX or AVX-512 bfloat16"
    if "avx2" not in known:
        advice = "no AVX2: models run many times slower than on a processor of the last ten years"
    slow = "avx2" not in known or not {"amx_bf16", "avx512_bf16"} & machine.flags
    return graded(
        "processor", ", ".join(known) or "no vector instructions known", advice, warning=slow and not machine.gpus
    )


def _torch(machine: Machine) -> Finding:
    found = f"{f'torch {machine.torch}' if machine.torch else 'no torch'}, {', '.join(machine.gpus) or 'no GPU'}"
    if not machine.torch:
        advice = "only a gateway or a client runs here; for models pip install 'rootward[worker]'"
        return graded("torch", found, advice, warning=True)
    advice = "there is a GPU that this torch does not see; install a torch build for it (pytorch.org), or its driver"
    return graded("torch", found, advice, problem=machine.has_gpu and not machine.gpus)


def _descriptors(machine: Machine) -> Finding:
    number = machine.descriptors
    if number == resource.RLIM_INFINITY:
        return graded("file descriptors", "no limit")
    advice = "every client and stream takes one; raise it with ulimit -n 65536 or LimitNOFILE of the unit"
    return graded(
        "file descriptors",
        f"at most {number}",
        advice,
        problem=number < LEAST_DESCRIPTORS,
        warning=number < FEW_DESCRIPTORS,
    )


# -- facts --------------------------------------------------------------------------------------------------------------------


def _torch_and_gpus() -> tuple[str, tuple[str, ...]]:
    """(version, names of GPUs); empty without torch."""
    try:
        import torch
    except ImportError:
        return "", ()
    names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return torch.__version__, names


def _available_memory() -> int:
    """Bytes: of the machine, and of the container if that has less."""
    kilobytes = _found(r"^MemAvailable:\s+(\d+)", "/proc/meminfo")
    known = [int(kilobytes) << 10] if kilobytes else []
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        known.append(max(0, int(limit) - int(used)))
    return min(known, default=0)


def _found(pattern: str, path: str) -> str:
    """The group of the first match in a file; "" without one."""
    found = re.search(pattern, _text(path), re.MULTILINE)
    return found[1] if found else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
