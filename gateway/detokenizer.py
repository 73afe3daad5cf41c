"""Token ids to text, one token at a time, without ever decoding the whole text again.

Decoding is not a sum over tokens: a character may be split over several tokens, and some tokenizers drop the blank before
the first word of what they decode. So a short window of recent tokens is decoded and compared with what it gave before. The
window moves on at *clean* ends, where no character is incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what decoders put where bytes are no character (yet)
_LONGEST_CHARACTER = (
    8  # tokens after which bytes that are no character are taken for broken ones; UTF-8 needs at most 4
)
_MOVE_AT = 24  # tokens in the window before it moves on
_MOVE_ANYWAY_AT = 64  # the same where no clean end was seen
_OVERLAP = 4  # fewest tokens that stay in the window
_CONTEXT = 8  # tokens of the prompt that the first output token is decoded with


class Detokenizer:
    """`push` gives the text that became certain with a token; all pieces and `flush` together are the decoded text.

    `decode` must not tidy up spaces (that rewrites text already given out). `context` is the prompt, whose end decides how
    the first output token is written. `hidden` tokens have no text (special tokens).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        hidden: frozenset[int] = frozenset(),
    ):
        self._decode = decode
        self._hidden = hidden
        self._window = [t for t in context[-_CONTEXT:] if t not in hidden]
        self._clean: list[int] = []  # lengths of the window at which its text ended with a whole character
        self._dirty = 0  # tokens since the last clean end
        text = decode(self._window) if self._window else ""
        self._given = len(text.rstrip(REPLACEMENT))  # characters of the window's text that are out already

    @property
    def pending(self) -> bool:
        """Bytes are held that may become a character."""
        return self._dirty > 0

    def push(self, token: int) -> str:
        """The text that is certain now; "" in the middle of a character and for hidden tokens."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            self._dirty += 1
        else:
            self._dirty = 0
            self._clean.append(len(self._window))
        piece = self._take(self._certain(text))
        self._move()
        return piece

    def flush(self) -> str:
        """What is still held, broken bytes as U+FFFD. Nothing may be pushed afterwards."""
        self._dirty = 0
        return self._take(self._decode(self._window)) if self._window else ""

    def _certain(self, text: str) -> str:
        if not self._dirty:
            return text
        if self._dirty <= _LONGEST_CHARACTER:
            return text.rstrip(REPLACEMENT)
        return text[:-1]  # too long for one character: all but the last mark are broken for good

    def _take(self, certain: str) -> str:
        piece = certain[self._given :]
        self._given = max(self._given, len(certain))
        return piece

    def _move(self) -> None:
        """Forget the front of a long window; what stays must decode to something, so that a first blank is not lost."""
        size = len(self._window)
        if size < _MOVE_AT:
            return
        cut = max((c for c in self._clean if c <= size - _OVERLAP), default=0)
        if not cut and size >= _MOVE_ANYWAY_AT:
            cut = size - 2 * _LONGEST_CHARACTER
        certain = self._certain(self._decode(self._window[cut:])) if cut else ""
        if certain:
            self._window = self._window[cut:]
            self._clean = [c - cut for c in self._clean if c > cut]
            self._given = len(certain)
