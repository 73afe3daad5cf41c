"""Prompts cut from held-out files: beginnings of modules, classes and functions, ended at a line end."""

import ast
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from training.corpus import SourceFile

MIN_TOKENS, MAX_TOKENS = 60, 200
PER_FILE = 4
COUNT = 100


def _beginnings(file: SourceFile) -> Iterator[int]:
    """First lines (from 1) of the module and of its top-level classes and functions, decorators included."""
    yield 1
    for node in ast.parse(file.text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _wanted_tokens(source: str) -> int:
    """A length between the limits that depends on the source's name only, so that lengths vary and stay."""
    return MIN_TOKENS + hashlib.sha256(source.encode()).digest()[0] * (MAX_TOKENS - MIN_TOKENS) // 255


def _cut(lines: list[str], wanted: int, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The longest run of whole lines of at most `wanted` tokens, or None where that is too short."""
    best = None
    for end in range(1, len(lines) + 1):
        text = "\n".join(lines[:end]).rstrip()
        count = len(tokenizer(text).input_ids)
        if count > wanted:
            break
        best = text if count >= MIN_TOKENS else best
    return best


def _from_file(file: SourceFile, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, str]]:
    lines = file.text.splitlines()
    taken = 0
    for first in _beginnings(file):
        source = f"{file.name}:{first}"
        text = _cut(lines[first - 1 : first + 60], max(MIN_TOKENS + 30, _wanted_tokens(source)), tokenizer)
        if text is not None and taken < PER_FILE:
            taken += 1
            yield {"text": text, "source": source}


def write(path: Path, files: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> int:
    """Write up to `COUNT` prompts as JSON lines, files taking turns; return how many."""
    queues = [list(_from_file(file, tokenizer)) for file in files]
    turns = [queue[i] for i in range(PER_FILE) for queue in queues if i < len(queue)]
    chosen = sorted(turns[:COUNT], key=lambda prompt: prompt["source"])
    path.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in chosen), encoding="utf-8")
    return len(chosen)
