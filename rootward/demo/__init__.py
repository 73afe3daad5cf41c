"""What the demo serves: a real chat model from the package index (`benchmarks.smollm2`), or a small shipped pair that needs no download.

The shipped pair are two Llama folders in Hugging Face format that share one tokenizer; they continue Python source and were made by
`python -m training.train`. Importing this module loads no torch.
"""

import json
from pathlib import Path
from typing import NamedTuple

from rootward.errors import ConfigurationError
from rootward.host import user_cache

SMOLLM2 = "SmolLM2-135M-Instruct"
_HERE = Path(__file__).resolve().parent


class DemoPaths(NamedTuple):
    """The two local model folders."""

    target: Path
    draft: Path


def paths() -> DemoPaths:
    """Where the target model and the draft model lie, each a complete Hugging Face folder."""
    return DemoPaths(target=_HERE / "target", draft=_HERE / "draft")


def target_named(spec: str) -> str:
    """The target model that a command line names: `demo` is that of the shipped pair."""
    return str(paths().target) if spec == "demo" else spec


def draft_named(spec: str) -> str:
    """As `target_named`, for the draft model."""
    return str(paths().draft) if spec == "demo" else spec


def smollm2() -> Path:
    """Path of the GGUF file of SmolLM2-135M-Instruct in the user's cache. `make demo` fetches it; until then it does not exist."""
    return user_cache() / "models" / f"{SMOLLM2}.gguf"


def smollm2_head() -> Path:
    """Where the draft head for SmolLM2-135M-Instruct lies; see its `README.md`."""
    return _HERE / "smollm2_head"


def prompts() -> list[str]:
    """Prompts from files that neither model nor tokenizer ever saw; see `prompts.jsonl` for the source of each."""
    return read_prompts(_HERE / "prompts.jsonl")


def chats() -> list[str]:
    """First messages of conversations, for chat models."""
    return read_prompts(_HERE / "chats.jsonl")


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: JSON objects with `text`, or plain text. ConfigurationError if there is none."""
    try:
        # Not `splitlines`: JSON may contain characters as U+2028 that it takes for ends of lines.
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts: {str(path)!r} cannot be read ({error}); give one prompt a line") from None
    if not lines:
        raise ConfigurationError(f"--prompts: {str(path)!r} is empty; give one prompt a line")
    if path.suffix not in (".json", ".jsonl"):
        return lines
    try:
        return [str(json.loads(line)["text"]) for line in lines]
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"--prompts: {str(path)!r} has a line that is no object with `text`") from None
