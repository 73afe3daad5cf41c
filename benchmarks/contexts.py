"""Contexts of drafts: positions in the target's own continuations of held-out prompts.

Legend: C contexts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rootward.core.requests import Sampling
from rootward.engine.sampling import distributions
from rootward.engine.verify import inverse_rows
from rootward.errors import ConfigurationError
from rootward.ports import LanguageModel, Rows

PREFILL_ROWS = 2048  # rows of one prefill forward


def tokenised(prompts: Sequence[str], tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of each prompt, its end kept; prompts without a token are left out."""
    found = [tokenizer(prompt, add_special_tokens=False)["input_ids"][-longest:] for prompt in prompts]
    kept = [list(map(int, ids)) for ids in found if ids]
    if not kept:
        raise ConfigurationError("prompts: none has a token; give text that the tokenizer knows")
    return kept


def random_prompts(num_prompts: int, vocab: int, length: int, seed: int) -> list[list[int]]:
    """Token ids for a model without a tokenizer."""
    rng = np.random.default_rng([seed, 101])
    return [list(map(int, row)) for row in rng.integers(vocab, size=(num_prompts, length))]


def continued(
    model: LanguageModel, prompts: Sequence[Sequence[int]], temperature: float, which: range, longest: int, seed: int
) -> list[list[int]]:
    """The contexts of these numbers: prompts in turn, each continued by the model itself for 0…longest tokens (never
    past an end of text). All in lockstep, one token a forward."""
    num = len(which)
    rng = np.random.default_rng([seed, 102, int(temperature * 1000), which.start])
    texts = [list(prompts[i % len(prompts)]) for i in which]
    wanted = [len(text) + int(n) for text, n in zip(texts, rng.integers(longest + 1, size=num), strict=True)]
    slots = [model.open() for _ in range(num)]
    try:
        logits_CV = prefill(model, slots, texts)
        alive = [i for i in range(num) if len(texts[i]) < wanted[i]]
        while alive:
            tokens = _tokens(logits_CV[alive], temperature, rng)
            alive = [i for i, token in zip(alive, tokens, strict=True) if _goes_on(model, texts[i], token, wanted[i])]
            if alive:
                last = [Rows.chain(slots[i], 0, texts[i][-1:]) for i in alive]
                logits_CV[alive] = model.forward(last)
                for i in alive:
                    model.commit(slots[i], 0, keep_below=False)
    finally:
        for slot in slots:
            model.close(slot)
    return texts


def prefill(model: LanguageModel, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Commit each text to its slot; logits [C, V] of its last token (zeros for an empty text)."""
    last_CV: torch.Tensor | None = None
    waiting = [i for i in range(len(texts)) if len(texts[i])]
    while waiting:
        part: list[int] = []
        while waiting and (
            not part or (len(part) + 1) * max(len(texts[i]) for i in [*part, waiting[0]]) <= PREFILL_ROWS
        ):
            part.append(waiting.pop(0))
        logits = model.forward([Rows.chain(slots[i], 0, texts[i]) for i in part], num_logits=[1] * len(part))
        for i in part:
            model.commit(slots[i], len(texts[i]) - 1, keep_below=False)
        if last_CV is None:
            last_CV = logits.new_zeros(len(texts), logits.shape[1])
        last_CV[part] = logits
    return last_CV if last_CV is not None else torch.zeros(len(texts), model.info.vocab_size)


def _tokens(logits_CV: torch.Tensor, temperature: float, rng: np.random.Generator) -> list[int]:
    probs = distributions(logits_CV, [Sampling(temperature)] * len(logits_CV))
    tokens: list[int] = inverse_rows(probs, rng.random(len(logits_CV))).tolist()
    return tokens


def _goes_on(model: LanguageModel, text: list[int], token: int, wanted: int) -> bool:
    """Append the token unless it ends the text; whether more is wanted."""
    if token in model.info.eos_ids:
        return False
    text.append(token)
    return len(text) < wanted
