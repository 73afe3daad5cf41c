"""Sampling parameters of HTTP requests that give none: those that a model's generation_config.json recommends, as vLLM takes them."""

from __future__ import annotations

import json
from pathlib import Path

from rootward.core.requests import Sampling
from rootward.errors import ConfigurationError

FILE = "generation_config.json"
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(model: str) -> Sampling:
    """For a folder or hub name; parameters that the file does not have stay off. ConfigurationError for a file that cannot be used."""
    if model.startswith("tabular:"):
        return Sampling()
    from transformers.utils.hub import cached_file

    path = cached_file(str(Path(model).expanduser()), FILE, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return Sampling()
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        given = {name: values[name] for name in RECOMMENDED if values.get(name) is not None}
        return Sampling(**given)
    except (ValueError, TypeError, AttributeError) as wrong:
        fix = "mend the file, or use http_sampling_defaults: openai"
        raise ConfigurationError(f"{FILE} of {model!r}: {wrong}; {fix}") from wrong
