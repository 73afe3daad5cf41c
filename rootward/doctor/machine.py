"""Checks of this machine."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from rootward.doctor.findings import Finding, graded
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
    want to run, mean of a minute. torch: version, "" without it. gpus: names that torch sees; has_gpu: the system has the driver of one.
    packages: distribution → (installed version, what Rootward asks for), of those that do not fit. huge_pages: setting of the kernel,
    "" where it has none."""

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
    packages: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    num_packages: int = 0
    huge_pages: str = ""


def look() -> Machine:
    """The facts of this machine. Imports torch if it is installed."""
    torch_version, gpus = _torch()
    wrong, num_packages = _packages()
    return Machine(
        cores=available_cores(),
        all_cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        memory=_available_memory(),
        flags=_flags(),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        threads=thread_variables(),
        torch=torch_version,
        gpus=gpus,
        has_gpu=Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists(),
        packages=wrong,
        num_packages=num_packages,
        huge_pages=_chosen(_text("/sys/kernel/mm/transparent_hugepage/enabled")),
    )


def judge(machine: Machine) -> list[Finding]:
    return [
        _cores(machine),
        _threads(machine),
        _memory(machine),
        _processor(machine),
        _devices(machine),
        _installed(machine),
        _descriptors(machine),
        _pages(machine),
    ]


def _cores(machine: Machine) -> Finding:
    found = f"{machine.cores} of {machine.all_cores} usable, load {machine.load:.1f}"
    warning = ""
    if machine.cores < 2:
        warning = "a gateway and a model share one core; give the container or the virtual machine at least 2"
    elif machine.load > BUSY * machine.cores:
        warning = "other processes take the cores; stop them, or measure later: step times will be wrong"
    return graded("cores", found, warning=warning)


def _threads(machine: Machine) -> Finding:
    found = ", ".join(f"{name}={value}" for name, value in machine.threads.items()) or "no limits in the environment"
    numbers = {name: int(value) for name, value in machine.threads.items() if value.isdecimal()}
    more = [name for name, value in numbers.items() if value > machine.cores]
    fewer = [name for name, value in numbers.items() if value < machine.cores]
    warning = ""
    if more:
        warning = f"{more[0]} exceeds the {machine.cores} cores, threads will wait for one another; unset it"
    elif fewer:
        warning = f"{fewer[0]} is below the {machine.cores} cores; unset it, and give each service its --num-threads"
    return graded("threads", found, warning=warning)


def _memory(machine: Machine) -> Finding:
    found = f"{machine.memory / GIB:.1f} GiB available"
    problem = "too little for a model and its KV cache; free some, or use a larger machine"
    warning = "enough for small models only; bound KV memory with --kv-cache-tokens (docs/models.md)"
    return graded(
        "memory",
        found,
        problem=problem if machine.memory < LEAST_MEMORY else "",
        warning=warning if machine.memory < LITTLE_MEMORY else "",
    )


def _processor(machine: Machine) -> Finding:
    known = [name for name in INSTRUCTIONS if name in machine.flags]
    warning = ""
    if not machine.gpus and "avx2" not in machine.flags:
        warning = "no AVX2: models run many times slower than on a processor of the last ten years"
    elif not machine.gpus and not {"amx_bf16", "avx512_bf16"} & machine.flags:
        warning = (
            "no bfloat16 arithmetic: a tree of many nodes costs more than on a processor with AMX or AVX-512 bfloat16"
        )
    return graded("processor", ", ".join(known) or "no vector instructions known", warning=warning)


def _devices(machine: Machine) -> Finding:
    found = f"torch {machine.torch}" if machine.torch else "no torch"
    found += f", {', '.join(machine.gpus)}" if machine.gpus else ", no GPU"
    problem = warning = ""
    if not machine.torch:
        warning = "only a gateway or a client runs here; for models pip install 'rootward[worker]'"
    elif machine.has_gpu and not machine.gpus:
        problem = (
            "there is a GPU that this torch does not see; install a torch build for it (pytorch.org), or its driver"
        )
    return graded("torch", found, problem=problem, warning=warning)


def _installed(machine: Machine) -> Finding:
    wrong = [f"{name} {own} (needs {needed})" for name, (own, needed) in sorted(machine.packages.items())]
    found = ", ".join(wrong) or f"{machine.num_packages} fit"
    problem = (
        "install the versions that fit: pip install -c constraints.txt 'rootward[gateway,worker]'" if wrong else ""
    )
    return graded("packages", found, problem=problem)


def _descriptors(machine: Machine) -> Finding:
    number = machine.descriptors if machine.descriptors != resource.RLIM_INFINITY else 1 << 30
    advice = "every client and stream takes one; raise it with ulimit -n 65536 or LimitNOFILE of the unit"
    return graded(
        "file descriptors",
        "no limit" if machine.descriptors == resource.RLIM_INFINITY else f"at most {number}",
        problem=advice if number < LEAST_DESCRIPTORS else "",
        warning=advice if number < FEW_DESCRIPTORS else "",
    )


def _pages(machine: Machine) -> Finding:
    warning = "weights are read through small pages; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return graded(
        "huge pages", machine.huge_pages or "unknown", warning=warning if machine.huge_pages == "never" else ""
    )


# -- facts --------------------------------------------------------------------------------------------------------------------


def _torch() -> tuple[str, tuple[str, ...]]:
    """(version, names of GPUs); empty without torch."""
    try:
        import torch
    except ImportError:
        return "", ()
    names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return torch.__version__, names


def _packages() -> tuple[dict[str, tuple[str, str]], int]:
    """Installed packages that are not what the metadata of Rootward asks for, and how many were compared."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return {}, 0
    try:
        lines = requires("rootward") or []
    except PackageNotFoundError:
        return {}, 0
    wrong: dict[str, tuple[str, str]] = {}
    names = set()
    for line in lines:
        needed = Requirement(line)
        if needed.marker is not None and "extra" not in str(needed.marker) and not needed.marker.evaluate():
            continue
        try:
            own = version(needed.name)
        except PackageNotFoundError:  # of an extra that is not installed
            continue
        names.add(needed.name)
        if not needed.specifier.contains(own, prereleases=True):
            wrong[needed.name] = own, str(needed.specifier)
    return wrong, len(names)


def _available_memory() -> int:
    """Bytes: of the machine, and of the container if that has less."""
    kilobytes = re.search(r"^MemAvailable:\s+(\d+)", _text("/proc/meminfo"), re.M)
    known = [int(kilobytes[1]) << 10] if kilobytes else []
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        known.append(max(0, int(limit) - int(used)))
    return min(known, default=0)


def _flags() -> frozenset[str]:
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", _text("/proc/cpuinfo"), re.M)
    return frozenset(line[1].split()) if line else frozenset()


def _chosen(text: str) -> str:
    """The word in brackets of a text such as `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
