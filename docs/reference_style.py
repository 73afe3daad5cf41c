"""A griffe extension: docstrings of this repository as Markdown.

Comments behind fields become their descriptions, and paragraphs written in columns keep them.
"""

from __future__ import annotations

import io
import re
import tokenize
from typing import Any

import griffe

COLUMNS = re.compile(r"^\S.*? {2,}\S")  # a name, two blanks or more, what it is


class ReferenceStyle(griffe.Extension):
    """See the module."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.is_attribute and obj.docstring is None and (comment := _comment(obj)):
            obj.docstring = griffe.Docstring(comment, parent=obj)
        elif obj.docstring is not None:
            obj.docstring.value = _with_columns(obj.docstring.value)


def _comment(attribute: griffe.Object) -> str:
    """The comment behind an assignment, as a sentence; "" without one."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(attribute.source + "\n").readline))
    except tokenize.TokenError:
        return ""
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    text = " ".join(comment for comment in comments if not comment.startswith(("type:", "noqa")))
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")


def _with_columns(docstring: str) -> str:
    """Paragraphs in columns, and trees, as preformatted text."""
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(f"```text\n{p}\n```" if _preformatted(p) else p for p in paragraphs)


def _preformatted(paragraph: str) -> bool:
    lines = paragraph.split("\n")
    if lines[0].startswith((" ", "|", "```")):
        return False
    return bool(COLUMNS.match(lines[0])) or any(line.startswith(("├", "└")) for line in lines)
