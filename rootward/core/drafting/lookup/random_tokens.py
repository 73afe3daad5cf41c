"""Tokens that mean nothing: a drafter that is wrong must change nothing but the speed."""

from __future__ import annotations

from collections.abc import Sequence

from rootward.core.drafting.lookup.source import Candidate
from rootward.core.frames import extend_hash

FAMILY = 4  # candidates per state
ACCEPTANCE = 0.5  # pretended


class RandomTokens:
    """A deterministic function of (seed, text): the state is the hash of both."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        if vocab < 1:
            raise ValueError(f"vocab: {vocab}; one token at least")
        self.vocab = vocab
        self._state = extend_hash(0, seed)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._state = extend_hash(self._state, token)

    def start(self) -> int:
        return self._state

    def step(self, state: int, token: int) -> int:
        return extend_hash(state, token)

    def candidates(self, state: int) -> list[Candidate]:
        # Negative numbers are no tokens, so these hashes are not those of a longer text.
        tokens = dict.fromkeys(extend_hash(state, -2 - i) % self.vocab for i in range(FAMILY))
        return [Candidate(token, ACCEPTANCE * (1.0 - ACCEPTANCE) ** rank) for rank, token in enumerate(tokens)]
