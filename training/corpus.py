"""The text the demo pair learns from: the Python standard library of the running interpreter.

Files are split 90/10 by a hash of their relative path, so the split is the same on every machine and for every order
of listing, and a file keeps its side when others come or go. Held-out files train neither models nor tokenizer.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PERCENT = 10
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "test", "tests"})
# Tables rather than code: character maps and the compiled help topics would be 15 % of the bytes and teach nothing.
GENERATED_FOLDERS = frozenset({"encodings", "pydoc_data"})
# Build settings of one machine, with its paths.
GENERATED_PREFIXES = ("_sysconfigdata", "config-")


class SourceFile(NamedTuple):
    """One library file: its path below the library root (with `/`), and its text."""

    name: str
    text: str


def library_root() -> Path:
    """The folder of the standard library of this interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name belongs to the held-out tenth."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def _is_wanted(relative: Path) -> bool:
    folders = set(relative.parts[:-1])
    generated = any(part.startswith(GENERATED_PREFIXES) for part in relative.parts)
    return not generated and not folders & (SKIPPED_FOLDERS | GENERATED_FOLDERS)


def _all_files(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if not _is_wanted(relative):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield SourceFile(relative.as_posix(), text)


def training_files(root: Path | None = None) -> list[SourceFile]:
    """The nine tenths that train, in path order."""
    return [f for f in _all_files(root or library_root()) if not is_held_out(f.name)]


def held_out_files(root: Path | None = None) -> list[SourceFile]:
    """The tenth that never trains, in path order."""
    return [f for f in _all_files(root or library_root()) if is_held_out(f.name)]
