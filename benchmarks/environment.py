"""What a dated result names: hardware, commit, versions. Nothing that tells one machine from another of its kind."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count
from pathlib import Path
from typing import Any

PACKAGES = ("rootward", "numpy", "torch", "transformers")


def described() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": f"{cpu_model()}, {cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def cpu_model() -> str:
    """The processor's own name of its model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit of the checkout this runs from; "" outside of one."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
