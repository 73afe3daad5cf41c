"""A source of pseudo-random tokens: a drafter that is wrong must change nothing but the speed."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_service.growth_loop import DrafterService, without_model
from drafter_service.lookup_grower import LookupGrower
from rootward.core.frames import extend_hash
from rootward.core.lookup import Candidate
from rootward.ports import ModelInfo

FAMILY = 4  # candidates per state
ACCEPTANCE = 0.5  # pretended


class RandomTokens:
    """Pseudo-random tokens, a function of (seed, text): a drafter that is wrong must change nothing but the speed. State: hash of both."""

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


def random_grower(vocab: int, seed: int = 0, *, incarnation: int = 9) -> LookupGrower:
    return LookupGrower(
        ModelInfo("random", 0, 4096),
        lambda message, _: RandomTokens(vocab, seed),
        incarnation=incarnation,
    )


def random_drafter(vocab: int, seed: int) -> DrafterService:
    grower = random_grower(vocab, seed)
    return DrafterService(grower, capacity=16, agree=without_model)
