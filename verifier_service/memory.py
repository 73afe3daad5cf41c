"""KV blocks as numbers: what a session holds, what it will need, who may still be let in."""

from __future__ import annotations

from collections.abc import Iterable

from rootward.ports import LanguageModel
from verifier_service.sessions import Session


class Memory:
    """The KV cache of the target as the scheduler counts it. num_draft_tokens: nodes of the largest tree, root excluded."""

    def __init__(self, model: LanguageModel, num_draft_tokens: int) -> None:
        self._model, self._num_draft_tokens = model, num_draft_tokens

    @property
    def block_size(self) -> int:
        return self._model.block_size

    @property
    def free_blocks(self) -> int:
        return self._model.num_free_blocks

    @property
    def free_rows(self) -> int:
        return self.free_blocks * self.block_size

    def held(self, session: Session) -> tuple[int, int]:
        """(rows it can write without taking a block, blocks it holds, shared ones included)."""
        length = 0 if session.kv_slot is None else self._model.length(session.kv_slot)
        return -length % self.block_size, self._blocks(length)

    def admits(self, session: Session, running: Iterable[Session]) -> bool:
        """Whether there is a slot, and blocks for all its text and one tree beside what the running ones were let in with.

        Whoever is alone is let in: one session at its longest always fits (`ports.LanguageModel`)."""
        others = list(running)
        if not self._model.num_free_slots:
            return False
        promised = sum(max(0, self._wanted(other) - self.held(other)[1]) for other in others)
        return not others or self._wanted(session) <= self.free_blocks - promised

    def _wanted(self, session: Session) -> int:
        """Blocks of its text so far and of one round on top."""
        wish = session.request.speculation.num_draft_tokens or self._num_draft_tokens
        nodes = min(wish, self._num_draft_tokens) if session.law is not None else 0
        return self._blocks(len(session.tokens) + nodes)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
