"""Thoughts of models that write them in tags, told apart from the answer that follows. Speculation knows nothing of them."""

from __future__ import annotations

from enum import Enum

from gateway.detokenizer import held_back

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    UNDECIDED = 0  # nothing but blanks or a part of the opening tag
    THINKING = 1
    ANSWERING = 2


class ThoughtParser:
    """Splits one text into the thoughts between the tags that it may begin with and the rest, as the text arrives, token by token.

    opened: the prompt ends with the opening tag, as chat templates of some models have it.
    """

    def __init__(self, *, opened: bool):
        self._state = _State.THINKING if opened else _State.UNDECIDED
        self._held = ""  # may be a tag or the beginning of one
        self.num_tokens = 0  # of the thoughts, tags included

    def push(self, text: str) -> tuple[str, str]:
        """What is certain after one more token: (more thoughts, more of the answer)."""
        if self._state is _State.ANSWERING:
            return "", text
        self.num_tokens += 1
        self._held += text
        if self._state is _State.UNDECIDED:
            begun = self._held.lstrip()
            if not begun.startswith(OPEN):
                return ("", "") if OPEN.startswith(begun) else self._answered()
            self._state, self._held = _State.THINKING, begun.removeprefix(OPEN)
        thoughts, tag, answer = self._held.partition(CLOSE)
        if tag:
            self._state, self._held = _State.ANSWERING, ""
            return thoughts, answer
        num_free = len(self._held) - held_back(self._held, [CLOSE])
        thoughts, self._held = self._held[:num_free], self._held[num_free:]
        return thoughts, ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text. Thoughts that are cut stay thoughts."""
        if self._state is _State.UNDECIDED:
            return self._answered()
        thoughts, self._held = self._held, ""
        return thoughts, ""

    def _answered(self) -> tuple[str, str]:
        """The text begins with no thoughts."""
        answer, self._held = self._held, ""
        self._state, self.num_tokens = _State.ANSWERING, 0
        return "", answer
