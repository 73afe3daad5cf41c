"""Output text: token ids decoded one by one, cut at stop strings, and released when it is final."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rootward.core.requests import TokenLogprob

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character
_LONGEST_CHARACTER = 8  # tokens after which incomplete bytes count as broken; UTF-8 needs at most 4
_MOVE_AT = 24  # length of the window, in tokens, at which it moves
_MOVE_ANYWAY_AT = 64  # the same without a clean end in the window
_OVERLAP = 4  # fewest tokens that stay in the window
_CONTEXT = 8  # tokens of the prompt that the first output token is decoded with
_CUT = 3  # most tokens of a character that is cut, as at an end of the prompt's part that is looked at
_PART = 32  # tokens after which `Output.push` releases text


@dataclass(frozen=True, slots=True)
class Span:
    """One token and the text that it added ("" inside a character and for hidden tokens)."""

    token: int
    text: str
    accepted: bool  # an accepted draft token, not a bonus token
    logprob: TokenLogprob | None = None  # where the request asks for log-probabilities


class Detokenizer:
    """Decodes a stream of tokens. The results of `push` and of `flush`, joined, are the decoded text.

    decode: must not clean up spaces, which would change text that was returned before. context: the prompt, whose end decides how the
    first output token is written. hidden: tokens without text (special tokens).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        hidden: frozenset[int] = frozenset(),
    ):
        self._decode = decode
        self._hidden = hidden
        self._window, self._num_returned = _end_of([t for t in context[-_CONTEXT - _CUT :] if t not in hidden], decode)
        self._text = decode(self._window) if self._window else ""  # of the window
        self._clean_ends: list[int] = []  # lengths of the window at which its text ended with a whole character
        self._num_dirty = 0  # tokens since the last clean end
        self._lengths: list[int] = []  # of the text after each of the last tokens, as many as one character may have
        # Length of the text at the last clean end. A prompt that ends inside a character has none.
        self._num_clean = 0 if self._text.endswith(REPLACEMENT) else len(self._text)
        # Marks at the end of the prompt: bytes that may become a character of the output; what does not is no output.
        self._num_broken = len(self._text) - self._num_returned

    @property
    def pending(self) -> bool:
        """Bytes are held that may become a character."""
        return self._num_dirty > 0

    def push(self, token: int) -> str:
        """The text that is final now; "" in the middle of a character and for hidden tokens."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._text and (text or len(self._window) >= _MOVE_ANYWAY_AT) and self._has_no_text(token):
            self._window.pop()  # as ids beyond the tokenizer; a window of such tokens would never move
            return ""
        before, self._text = self._text, text
        if text.endswith(REPLACEMENT):
            self._num_dirty += 1
            if text[: self._num_clean] != before[: self._num_clean]:
                self._begin_at_clean_end()
        else:
            self._num_dirty, self._num_clean = 0, len(text)
            self._clean_ends.append(len(self._window))
        self._lengths = [*self._lengths[-_CUT:], len(self._text)]
        piece = self._return(self._final(self._text))
        self._move()
        return piece

    def _has_no_text(self, token: int) -> bool:
        """Whether a token that has not changed the text adds none. One mark may stand for several bytes of a character, each of which has
        text by itself."""
        return not self._text.endswith(REPLACEMENT) or not self._decode([token])

    def _begin_at_clean_end(self) -> None:
        """Drop the tokens before the last clean end: their text was returned and has changed. A byte-fallback decoder writes a whole row of
        bytes as marks while one of its characters is cut. The rest begins with such a byte, so no first blank is lost."""
        self._window, self._clean_ends = self._window[-self._num_dirty :], []
        self._text = self._decode(self._window)
        self._num_returned, self._num_clean, self._lengths = self._num_returned - self._num_clean, 0, []

    def flush(self) -> str:
        """The text that is still held, broken bytes as U+FFFD. No token may be pushed afterwards."""
        self._num_dirty = 0
        return self._return(self._text)

    def _final(self, text: str) -> str:
        if not self._num_dirty:
            return text
        if self._num_dirty <= _LONGEST_CHARACTER:
            return text.rstrip(REPLACEMENT)
        # Too long for one character: all but the last mark are broken for good, or are U+FFFD itself. Of a row of these, a byte-fallback
        # decoder writes one mark for each byte while the last one is cut, and fewer when it is whole.
        return text[: max(0, min(self._lengths) - 1)]

    def _return(self, final: str) -> str:
        # Bytes that were returned as marks may turn out to be characters, of which there are fewer.
        self._num_returned = min(self._num_returned, len(self._text))
        piece = final[self._num_returned :]
        self._num_returned = max(self._num_returned, len(final))
        if piece and self._num_broken:
            num_marks = len(piece) - len(piece.lstrip(REPLACEMENT))
            piece, self._num_broken = piece[min(num_marks, self._num_broken) :], 0
        return piece

    def _move(self) -> None:
        """Drop the front of a long window. The rest must decode to some text, or a first blank would be lost. As many characters of its end
        are held as before."""
        size = len(self._window)
        if size < _MOVE_AT:
            return
        cut = max((end for end in self._clean_ends if end <= size - _OVERLAP), default=0)
        if not cut and size >= _MOVE_ANYWAY_AT:
            cut = size - 2 * _LONGEST_CHARACTER
        text = self._decode(self._window[cut:]) if cut else ""
        if text:
            num_dropped = len(self._text) - len(text)
            self._window, self._text = self._window[cut:], text
            self._clean_ends = [end - cut for end in self._clean_ends if end > cut]
            self._num_returned = max(0, self._num_returned - num_dropped)
            self._num_clean = max(0, self._num_clean - num_dropped)
            self._lengths = [length - num_dropped for length in self._lengths]


def _end_of(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[list[int], int]:
    """(the last tokens of a prompt, number of whole characters of their text).

    A byte-fallback decoder writes a whole row of bytes as marks if one of its characters is cut. So the tokens begin at a character, and
    the whole characters are counted without a last one that is cut.
    """
    for num_cut in range(_CUT + 1):
        for size in range(_CONTEXT, _CONTEXT + _CUT + 1):
            text = decode(whole) if (whole := tokens[-size : len(tokens) - num_cut]) else ""
            if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                window = list(tokens[-size:])
                whole_text = decode(window).rstrip(
                    REPLACEMENT
                )  # a token may end one character and begin the one that is cut
                return window, len(whole_text) if whole_text.startswith(text) else len(text)
    window = list(tokens[-_CONTEXT:])
    return window, len(decode(window).rstrip(REPLACEMENT))


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string in a text, with the positions of its first character and of the one after its last."""

    stop: str
    begin: int
    end: int


def find_stop(text: str, stops: Sequence[str], after: int = 0) -> Match | None:
    """The stop string that ends first, and of those the longest, so that the result does not depend on the chunks of the text.

    A stop string that ends within the first `after` characters does not count.
    """
    found = [Match(s, at, at + len(s)) for s in stops if (at := text.find(s, max(0, after - len(s) + 1))) >= 0]
    return min(found, key=lambda m: (m.end, m.begin), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops if len(s) > n)), 0)


class Output:
    """The output of one generation: takes tokens, returns final spans. Text, ids and flags are cut at the same place.

    Tokens are released whole, and a character with all its tokens. `stop` is the stop string that ended the text.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ):
        self._detokenizer = detokenizer
        self._min_tokens_left = min_tokens  # number of next tokens that cannot complete a stop string
        self._num_stop_free = 0  # held characters that cannot complete a stop string
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held: list[Span] = []
        self._text = ""  # of the held spans
        # (number of held spans, number of their characters) up to each one that has text: most tokens may have none.
        self._ends: list[tuple[int, int]] = []
        self.stop: str | None = None

    def push(
        self, tokens: Sequence[int], accepted: Sequence[bool], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[Span]:
        """The spans that are final after these committed tokens."""
        known: Sequence[TokenLogprob | None] = logprobs or [None] * len(tokens)
        out: list[Span] = []
        for token, flag, logprob in zip(tokens, accepted, known, strict=True):
            piece = self._detokenizer.push(token)
            self._held.append(Span(token, piece, flag, logprob))
            if piece:
                self._text += piece
                self._ends.append((len(self._held), len(self._text)))
            if self._min_tokens_left:
                self._min_tokens_left -= 1
                self._num_stop_free = len(self._text)
            if piece and self._cut_at_stop():
                return out + self._release(len(self._held))
            if len(self._held) % _PART == 0:  # each token looks at all held text
                out += self._release(self._num_releasable())
        return out + self._release(self._num_releasable())

    def finish(self, hidden: Span | None = None) -> list[Span]:
        """All held spans; `hidden` is a last token whose text is not shown (end of sequence, stop token)."""
        if self.stop is not None:
            return []
        rest = self._detokenizer.flush()
        if rest and self._held:
            self._held[-1] = replace(self._held[-1], text=self._held[-1].text + rest)
            self._text += rest
        if not self._cut_at_stop() and hidden is not None:
            self._held.append(hidden)
        return self._release(len(self._held))

    def _cut_at_stop(self) -> bool:
        match = find_stop(self._text, self._stops, self._num_stop_free)
        if match is None:
            return False
        self.stop = match.stop
        self._held = _cut(self._held, match.end if self._include_stop else match.begin)
        return True

    def _num_releasable(self) -> int:
        """Number of spans up to the last one with text that ends before a possible beginning of a stop string."""
        safe = len(self._text) - held_back(self._text, self._stops)
        at_most = len(self._held) - self._detokenizer.pending  # the last token may be part of a character
        return max((count for count, end in self._ends if end <= safe and count <= at_most), default=0)

    def _release(self, count: int) -> list[Span]:
        if not count:  # usual while tokens have no text: the held ones are not copied
            return []
        out, self._held = self._held[:count], self._held[count:]
        length = len(text_of(out))
        self._text = self._text[length:]
        self._ends = [(number - count, end - length) for number, end in self._ends if number > count]
        self._num_stop_free = max(0, self._num_stop_free - length)
        return out


def text_of(spans: Sequence[Span]) -> str:
    return "".join(span.text for span in spans)


def _cut(spans: Sequence[Span], length: int) -> list[Span]:
    """The spans that begin before `length` characters, the last one shortened to it."""
    kept: list[Span] = []
    begin = 0
    for span in spans:
        if begin >= length:
            break
        kept.append(replace(span, text=span.text[: length - begin]))
        begin += len(span.text)
    return kept
