"""Separates the thoughts that models write in tags from the answer that follows."""

from __future__ import annotations

from gateway.detokenizer import held_back

OPEN, CLOSE = "<think>", "</think>"


class ThoughtParser:
    """Splits one text, token by token, into the thoughts between the tags at its beginning and the rest.

    opened: the prompt ends with the opening tag, as some chat templates have it.
    """

    def __init__(self, *, opened: bool):
        self._opened = opened  # the text begins with thoughts
        self._closed = False  # the rest of the text is the answer
        self._blanks: list[str] = []  # of the beginning of the text, until a tag or an answer follows
        self._held = ""  # may be a tag or the beginning of one
        self.num_tokens = 0  # of the thoughts, tags included

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, text of the answer) that are final after one more token."""
        if self._closed:
            return "", text
        self.num_tokens += 1
        self._held += text
        if not self._opened:
            begun = self._held.lstrip()
            self._blanks.append(self._held[: len(self._held) - len(begun)])
            self._held = begun
            if not begun.startswith(OPEN):
                return ("", "") if OPEN.startswith(begun) else self._answered()
            self._opened, self._blanks, self._held = True, [], begun.removeprefix(OPEN)
        thoughts, tag, answer = self._held.partition(CLOSE)
        if tag:
            self._closed, self._held = True, ""
            return thoughts, answer
        num_free = len(self._held) - held_back(self._held, [CLOSE])
        thoughts, self._held = self._held[:num_free], self._held[num_free:]
        return thoughts, ""

    def finish(self) -> tuple[str, str]:
        """The same for the held rest, at the end of the text. Thoughts without a closing tag stay thoughts."""
        if not self._opened:
            return self._answered()
        thoughts, self._held = self._held, ""
        return thoughts, ""

    def _answered(self) -> tuple[str, str]:
        """The text does not begin with thoughts."""
        answer = "".join(self._blanks) + self._held
        self._blanks, self._held = [], ""
        self._closed, self.num_tokens = True, 0
        return "", answer
