"""The demo pair: a tiny trained target and draft that answer on a laptop without downloads.

Both are Llama folders in Hugging Face format that share one tokenizer; they continue Python source. Importing this
module is light (no torch): it only says where the files lie. How they were made: `python -m training.train`.
"""

import json
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent


class DemoPaths(NamedTuple):
    """The two local model folders."""

    target: Path
    draft: Path


def paths() -> DemoPaths:
    """Where the target model and the draft model lie, each a complete Hugging Face folder."""
    return DemoPaths(target=_HERE / "target", draft=_HERE / "draft")


def prompts() -> list[str]:
    """Prompts from files that neither model nor tokenizer ever saw; see `prompts.jsonl` for the source of each."""
    lines = (_HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
