"""The pair that is measured: folders on disk, the inflated target among them, and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.contexts import random_prompts, tokenised
from benchmarks.inflate import TOLERANCE, save_inflated
from benchmarks.measuring import short_name
from rootward import demo
from rootward.engine.loading import require_folder
from rootward.engine.tokenizers import find_tokenizer
from rootward.errors import ConfigurationError

UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class Pair:
    """Folders of target and draft. `original`: what the target computes, before inflation; the same folder without."""

    target: Path
    draft: Path
    original: Path
    num_target: int
    num_draft: int
    num_original: int
    largest_difference: float = 0.0  # of logits, inflated against original, on real prompts
    positions: int = 0  # longest text, by a changed configuration; 0: what the models were made for

    @property
    def inflated(self) -> bool:
        return self.original != self.target

    def described(self) -> dict[str, Any]:
        """Names and sizes; no paths."""
        numbers = {k: v for k, v in asdict(self).items() if not isinstance(v, Path)}
        return {"target": short_name(str(self.original)), "draft": short_name(str(self.draft)), **numbers}

    def sentence(self) -> str:
        """What every table must say about its models."""
        draft = f"draft {short_name(str(self.draft))} ({self.num_draft / 1e6:.2f} M parameters)"
        name = short_name(str(self.original))
        if self.positions:
            draft += (
                f"; both **extended** to {self.positions} positions by their configuration alone: they were trained on shorter texts, and "
                "what they write beyond, like its acceptance, is that of the extended models"
            )
        if not self.inflated:
            return f"Target {name} ({self.num_target / 1e6:.2f} M parameters), {draft}."
        return (
            f"Target {name} **inflated** from {self.num_original / 1e6:.2f} M to {self.num_target / 1e6:.1f} M parameters "
            f"(function-preserving; logits differ by at most {self.largest_difference:.0e}), {draft}. "
            "Step times are those of the large shape; acceptance and text are those of the small pair, not of a real large model."
        )


def parameters(text: str) -> int:
    """`300M`, `1.5G`, `500k` or a plain number."""
    scale = UNITS.get(text[-1:], 1.0)
    try:
        number = float(text[:-1] if text[-1:] in UNITS else text) * scale
    except ValueError:
        raise ConfigurationError(f"inflate: {text!r} is not a number of parameters; write for example 300M") from None
    if number < 1:
        raise ConfigurationError(f"inflate: {text!r} is below one parameter; write for example 300M")
    return int(number)


def width_for(config: dict[str, Any], num_layers: int, wanted: int) -> int:
    """The smallest MLP width, a multiple of 64, at which `num_layers` Llama layers have `wanted` parameters with the embedding."""
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    tables = 1 if config["tie_word_embeddings"] else 2
    rest = wanted - tables * config["vocab_size"] * hidden - num_layers * (attention + 2 * hidden) - hidden
    width = max(-(-rest // (3 * hidden * num_layers)), config["intermediate_size"])
    return int(-(-width // 64) * 64)


def prepare(
    target: Path, draft: Path, inflate: str | None, num_layers: int, work: Path, positions: int | None = None
) -> Pair:
    """The pair as folders, inflated and extended as asked for: what is changed is written to `work`."""
    pair = _prepared(target, draft, inflate, num_layers, work)
    if positions is None:
        return pair
    longer = {folder: extended(folder, positions, work) for folder in {pair.target, pair.draft, pair.original}}
    return replace(
        pair,
        target=longer[pair.target],
        draft=longer[pair.draft],
        original=longer[pair.original],
        positions=positions,
    )


def extended(folder: Path, positions: int, work: Path) -> Path:
    """The same weights under a configuration with so many positions."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    there = work / f"{positions}-positions" / folder.parent.name / folder.name
    there.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.name != "config.json" and not (there / file.name).exists():
            (there / file.name).symlink_to(file.resolve())
    (there / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}), encoding="utf-8")
    return there


def _prepared(target: Path, draft: Path, inflate: str | None, num_layers: int, work: Path) -> Pair:
    """An inflated target is compared with the original on real prompts."""
    draft_size = num_parameters(draft)
    original_size = num_parameters(target)
    if inflate is None:
        return Pair(target, draft, target, original_size, draft_size, original_size)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    layers = max(num_layers, config["num_hidden_layers"])
    width = width_for(config, layers, parameters(inflate))
    large = work / f"inflated-{layers}-layers-of-{width}"
    if not (large / "config.json").is_file():
        save_inflated(target, large, layers, width)
    difference = largest_difference(target, large, token_prompts(target)[:2])
    return Pair(large, draft, target, num_parameters(large), draft_size, original_size, difference)


@torch.inference_mode()
def largest_difference(a: Path, b: Path, prompts: Sequence[Sequence[int]]) -> float:
    """Of the logits of two folders. ValueError if it is more than rounding."""
    both = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (a, b)]
    rows = [[model(torch.tensor([prompt])).logits for model in both] for prompt in prompts]
    error = max(float((first - second).abs().max()) for first, second in rows)
    if not error < TOLERANCE:
        raise ValueError(
            f"inflate: logits differ by {error}, more than {TOLERANCE}; the folder is not the same function"
        )
    return error


def num_parameters(folder: Path) -> int:
    """Parameters of this shape, tied ones counted once. ConfigurationError if the folder holds no model."""
    require_folder(str(folder))
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        network.tie_weights()
    return sum(p.numel() for p in network.parameters())


def token_prompts(folder: Path) -> list[list[int]]:
    """The held-out demo prompts as this model's tokens; random ones of several lengths for a model without a tokenizer."""
    tokenizer = find_tokenizer(str(folder))
    if tokenizer is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rows = random_prompts(64, config["vocab_size"], 32, 0)
        return [row[: 16 + i % 17] for i, row in enumerate(rows)]
    return tokenised(demo.prompts(), tokenizer, 1 << 20)


class Prompts:
    """Prompts without end, no two alike: a second use of a text begins one token later, so that no cache of prefixes finds anything."""

    def __init__(self, texts: Sequence[Sequence[int]], seed: int):
        self._texts = [tuple(text) for text in texts]
        self._uses = [0] * len(texts)
        self._order = self._shuffled(seed)

    def _shuffled(self, seed: int) -> Iterator[int]:
        rng = np.random.default_rng([seed, 7])
        while True:
            yield from rng.permutation(len(self._texts)).tolist()

    def take(self, num: int, context: int) -> tuple[tuple[int, ...], ...]:
        """`num` prompts: whole ones for context 0, else several joined and cut to exactly `context` tokens."""
        return tuple(self._fresh(context) for _ in range(num))

    def _fresh(self, context: int) -> tuple[int, ...]:
        first = next(self._order)
        start, self._uses[first] = self._uses[first], self._uses[first] + 1
        prompt = self._texts[first][start:]
        if not prompt:
            raise ConfigurationError("prompts: all are used up; ask for fewer sessions or repetitions")
        while len(prompt) < context:
            prompt += self._texts[next(self._order)]
        return prompt[: context or None]
