"""Output as it leaves the gateway: tokens with their text, cut at stop strings, held back where a stop may be forming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.detokenizer import Detokenizer
from rootward.core.requests import TokenLogprob

PART = 32  # tokens


@dataclass(frozen=True, slots=True)
class Span:
    """One token and the text it added ("" inside a character and for hidden tokens)."""

    token: int
    text: str
    accepted: bool  # an accepted draft token, not a bonus token
    logprob: TokenLogprob | None = None  # where they are asked for


@dataclass(frozen=True, slots=True)
class Match:
    stop: str
    begin: int
    end: int


def find_stop(text: str, stops: Sequence[str], after: int = 0) -> Match | None:
    """The stop that is complete first; of those the longest. So the result does not depend on how text was chunked.

    One that ends within the first `after` characters does not count.
    """
    found = [Match(s, at, at + len(s)) for s in stops if (at := text.find(s, max(0, after - len(s) + 1))) >= 0]
    return min(found, key=lambda m: (m.end, m.begin), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning, but not the whole, of a stop."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops if len(s) > n)), 0)


class Output:
    """The stream of one generation: tokens in, releasable spans out. Text, ids and flags are always cut at the same place.

    Whole tokens are released, and a character is released with all its tokens. `stop` is the stop string that was found;
    nothing comes after it.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ):
        self._detokenizer = detokenizer
        self._deaf_tokens = min_tokens  # tokens still to come whose text completes no stop
        self._deaf = 0  # characters held that complete no stop
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held: list[Span] = []
        self.stop: str | None = None

    def push(
        self, tokens: Sequence[int], accepted: Sequence[bool], logprobs: Sequence[TokenLogprob] = ()
    ) -> list[Span]:
        """Take committed tokens; return the spans that are final. Part by part, for each token looks at all held text."""
        known: Sequence[TokenLogprob | None] = logprobs or [None] * len(tokens)
        out: list[Span] = []
        for token, flag, logprob in zip(tokens, accepted, known, strict=True):
            self._held.append(Span(token, self._detokenizer.push(token), flag, logprob))
            if self._deaf_tokens:
                self._deaf_tokens -= 1
                self._deaf = len(self._text())
            if self._cut_at_stop():
                return out + self._release(len(self._held))
            if len(self._held) % PART == 0:
                out += self._release(self._num_releasable())
        return out + self._release(self._num_releasable())

    def finish(self, hidden: Span | None = None) -> list[Span]:
        """Everything still held; `hidden` is a last token whose text is not shown (end of sequence, stop token)."""
        if self.stop is not None:
            return []
        rest = self._detokenizer.flush()
        if rest and self._held:
            self._held[-1] = replace(self._held[-1], text=self._held[-1].text + rest)
        if not self._cut_at_stop() and hidden is not None:
            self._held.append(hidden)
        return self._release(len(self._held))

    def _text(self) -> str:
        return "".join(span.text for span in self._held)

    def _cut_at_stop(self) -> bool:
        match = find_stop(self._text(), self._stops, self._deaf)
        if match is None:
            return False
        self.stop = match.stop
        self._held = _cut(self._held, match.end if self._include_stop else match.begin)
        return True

    def _num_releasable(self) -> int:
        """Spans up to the last one with text that ends before anything that may become a stop."""
        text = self._text()
        safe = len(text) - held_back(text, self._stops)
        count = end = 0
        for i, span in enumerate(self._held):
            end += len(span.text)
            whole = not (self._detokenizer.pending and i == len(self._held) - 1)
            if span.text and end <= safe and whole:
                count = i + 1
        return count

    def _release(self, count: int) -> list[Span]:
        out, self._held = self._held[:count], self._held[count:]
        self._deaf = max(0, self._deaf - sum(len(span.text) for span in out))
        return out


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
