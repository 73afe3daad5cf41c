"""The target's law after processors, one text at a time and from scratch: what the engine must give at every node of every tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rootward.core.requests import Sampling

# Name → (sampling, min_tokens): each processor alone, then together. Token STOP ends a text.
STOP = 1
PROCESSORS = {
    "temperature": (Sampling(0.6), 0),
    "top_k": (Sampling(top_k=2), 0),
    "top_p": (Sampling(top_p=0.6), 0),
    "min_p": (Sampling(min_p=0.4), 0),
    "repetition": (Sampling(repetition_penalty=1.8), 0),
    "presence": (Sampling(presence_penalty=1.1), 0),
    "frequency": (Sampling(frequency_penalty=-0.9), 0),
    "logit_bias": (Sampling(logit_bias=((2, 3.0), (0, -1.5))), 0),
    "allowed": (Sampling(allowed_token_ids=(0, 2)), 0),
    "bad_words": (Sampling(bad_sequences=((1,), (0, 0), (2, 0, 2, 0))), 0),
    "min_tokens": (Sampling(), 4),
    "all": (
        Sampling(
            0.7,
            top_k=3,
            top_p=0.95,
            min_p=0.05,
            repetition_penalty=1.5,
            presence_penalty=0.4,
            frequency_penalty=0.6,
            logit_bias=((1, 2.0),),
        ),
        4,
    ),
}


def processed_law(
    logits_V: np.ndarray, prompt: Sequence[int], output: Sequence[int], s: Sampling, min_tokens: int = 0, stops=(STOP,)
) -> np.ndarray:
    """float64[V] in the order of docs/parameters.md, straight from the definitions."""
    x = np.array(logits_V, dtype=np.float64)
    if s.allowed_token_ids:
        x[[t for t in range(len(x)) if t not in s.allowed_token_ids]] = -np.inf
    for *before, last in s.bad_sequences:
        if list(output[len(output) - len(before) :]) == before:
            x[last] = -np.inf
    if len(output) < min_tokens:
        x[list(stops)] = -np.inf
    for token, bias in s.logit_bias:
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= s.frequency_penalty * count + s.presence_penalty
    if s.greedy:
        return np.eye(len(x))[int(np.argmax(x))]
    p = _normal(np.exp((x - x.max()) / s.temperature))
    p = _normal(np.where(p < s.min_p * p.max(), 0, p))
    if 0 < s.top_k < len(p):
        p = _normal(np.where(p < np.sort(p)[-s.top_k], 0, p))
    order = np.argsort(-p, kind="stable")
    above = np.cumsum(p[order]) - p[order]
    p[order[above >= s.top_p]] = 0
    return _normal(p)


def text_law(next_law: Callable[[tuple[int, ...]], np.ndarray], length: int) -> dict[tuple[int, ...], float]:
    """The law of the next `length` tokens; `next_law` gives that of one token after some others."""
    texts = {(): 1.0}
    for _ in range(length):
        texts = {(*t, y): m * q for t, m in texts.items() for y, q in enumerate(next_law(t)) if q > 0}
    return texts


def _normal(p: np.ndarray) -> np.ndarray:
    return p / p.sum()
