"""A tabular model whose tokens are short texts, so that outputs have a form without a trained model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootward.engine.grammar import Grammars, Vocabulary
from rootward.engine.tabular import TabularModel

# Single characters and some runs that cross the borders of a JSON value, as tokens of a real vocabulary do.
TEXTS = [
    "", *'{}[]":, -.0123456789abcdetfnrsul\\\n', '{"', '":', '",', '"}', '"]', '": "', "true", "null", "00", 'a"',
]  # fmt: skip
EOS = 0
VOCAB = len(TEXTS)


class _Bytes:
    """What `llguidance` asks of a tokenizer."""

    eos_token_id, bos_token_id, special_token_ids = EOS, None, (EOS,)
    tokens = (b"<end>", *(text.encode() for text in TEXTS[1:]))

    def __call__(self, text: bytes) -> list[int]:
        return [self.tokens.index(bytes([b])) for b in text if bytes([b]) in self.tokens]


def grammars() -> Grammars:
    from llguidance import LLTokenizer, TokenizerWrapper

    return Grammars(lambda: Vocabulary(LLTokenizer(TokenizerWrapper(_Bytes())), VOCAB, (EOS,)))


def model(seed: int = 0, **law) -> TabularModel:
    return TabularModel(VOCAB, seed=seed, eos=EOS, **law)


def text(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[t] for t in tokens if t != EOS)


def allowed(masks: np.ndarray) -> np.ndarray:
    """bool[N, VOCAB] of packed rows."""
    return np.unpackbits(masks, axis=1, bitorder="little")[:, :VOCAB].astype(bool)
