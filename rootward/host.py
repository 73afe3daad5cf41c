"""The machine that this process runs on: cores, threads, memory pages, folders for caches."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_of_drafters(threads: int, num_drafters: int, *, have_heads: bool = False) -> int:
    """CPU threads of each drafter on the machine of its target, which has `threads`.

    A drafter works while its target waits and the other way round, so the target keeps all its threads. Half of them, shared among the
    drafters, are enough for models that are small (docs/log.md, lesson 8). Those of draft heads share all of them: they never grow ahead
    beside the target (benchmarks/results/2026-11-26-heads-over-the-wire)."""
    share = num_drafters if have_heads else 2 * num_drafters
    return max(1, threads // max(1, share))


def thread_variables() -> dict[str, str]:
    """Variables of the environment that bound the threads of numerical libraries, where they are set."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def environment_without(beginnings: tuple[str, ...]) -> dict[str, str]:
    """The environment without the variables whose names begin like this. Settings are read from names in either case."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(beginnings)}


def environment_with_packages(folder: Path) -> dict[str, str]:
    """The environment of a Python process that finds the packages in this folder, too."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *([known] if known else [])])}


def as_rank(index: int, size: int, *, per_node: int) -> None:
    """Make this process look like one that torchrun has started: transformers looks there for the GPU to use."""
    local = {"LOCAL_RANK": str(index % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    os.environ.update(RANK=str(index), WORLD_SIZE=str(size), **local)


def ask_for_huge_pages() -> None:
    """Make torch allocate in huge pages of 2 MiB, unless the environment forbids it (THP_MEM_ALLOC_ENABLE=0).

    Every step reads all weights, and page faults of 4 KiB pages cost a tenth of that time (docs/log.md). torch reads this variable once,
    when it allocates for the first time, so a process calls this before it loads a model.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def let_idle_threads_sleep() -> None:
    """Make threads of OpenMP sleep as soon as they wait, unless the environment decides that (OMP_WAIT_POLICY or GOMP_SPINCOUNT). Threads
    that spin take the cores from those that everybody waits for: beside one busy process a step is two to four times as long.

    libgomp reads these variables when torch loads it."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def user_cache() -> Path:
    """Folder for files that can be downloaded or computed again: $XDG_CACHE_HOME/rootward, by default ~/.cache/rootward."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rootward"


def folder_of_kernels(version: str) -> Path:
    """Folder of numba's compiled kernels: in the user's cache or, where that cannot be written, a new one of this process. The files are
    pickles, so no other user may write there."""
    folder = user_cache() / "kernels" / version
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # numba asks the same of a folder, which may be there already
    except OSError:  # a container whose file system is read-only
        folder = Path(tempfile.mkdtemp(prefix="rootward-kernels-"))
    return folder
