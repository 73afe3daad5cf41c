"""Commands in the Markdown pages of this repository."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(sh|bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(pages: tuple[str, ...], languages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(page, text) of each block in one of the languages."""
    for page in pages:
        for language, text in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            if language in languages:
                yield page, text


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a script; one may have several lines."""
    pending = ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation is open
            continue
        if words and not pending.endswith("\\\n"):
            yield words
            pending = ""
    assert not pending.strip(), f"no whole command: {pending}"
