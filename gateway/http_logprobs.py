"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from gateway.tokenizer import REPLACEMENT, Span
from rootward.core.requests import TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM writes the same number


class TokenTexts(Protocol):
    """What a tokenizer knows of single tokens."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Named:
    """A token as people read it. A token that holds but a part of a character goes by its id."""

    token: int
    text: str
    bytes: list[int] | None


class Names:
    """Texts of tokens, remembered: log-probabilities name the same ones again and again."""

    def __init__(self, tokenizer: TokenTexts, most: int = 1 << 16):
        self._tokenizer, self._most = tokenizer, most
        self._known: dict[int, Named] = {}

    def __getitem__(self, token: int) -> Named:
        named = self._known.get(token)
        if named is None:
            if len(self._known) >= self._most:
                self._known.clear()
            named = self._known[token] = self._named(token)
        return named

    def _named(self, token: int) -> Named:
        text, raw = self._tokenizer.decode([token], skip_special_tokens=False), self._tokenizer.token_bytes(token)
        return Named(token, f"token_id:{token}" if REPLACEMENT in text else text, None if raw is None else list(raw))


def of_completion(spans: Sequence[Span], text_at: int, names: Names) -> dict[str, object]:
    """One entry per token, null where there is no law (the first token of an echoed prompt). The emitted token is always
    among its top ones."""
    return {
        "tokens": [names[span.token].text for span in spans],
        "token_logprobs": [None if s.logprob is None else _number(s.logprob.logprob) for s in spans],
        "top_logprobs": [None if s.logprob is None else _top(_pairs(s), names) for s in spans],
        "text_offset": [*accumulate((len(span.text) for span in spans), initial=text_at)][:-1],
    }


def of_chat(spans: Sequence[Span], names: Names) -> dict[str, object]:
    content = []
    for span in spans:
        if span.logprob is not None:
            top = [_entry(token, logprob, names) for token, logprob in span.logprob.top]
            content.append(_entry(span.token, span.logprob.logprob, names) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def of_prompt(told: Sequence[TokenLogprob], tokens: Sequence[int], names: Names) -> list[dict[str, object] | None]:
    """vLLM's shape: by token id, of every prompt token; the first has no law."""
    entries: list[dict[str, object] | None] = [None]
    for token, of in zip(tokens[1:], told, strict=False):
        pairs = {**dict(of.top), token: of.logprob}
        entries.append({str(t): {"logprob": _number(p), "decoded_token": names[t].text} for t, p in pairs.items()})
    return entries


def _pairs(span: Span) -> list[tuple[int, float]]:
    assert span.logprob is not None
    return [*span.logprob.top, (span.token, span.logprob.logprob)]


def _top(pairs: Sequence[tuple[int, float]], names: Names) -> dict[str, float]:
    """Logprob by text. Of two tokens with the same text the later one goes by its id."""
    named: dict[str, tuple[int, float]] = {}
    for token, logprob in pairs:
        name = names[token].text
        if named.get(name, (token, 0.0))[0] != token:
            name = f"token_id:{token}"
        named[name] = token, _number(logprob)
    return {name: logprob for name, (_, logprob) in named.items()}


def _entry(token: int, logprob: float, names: Names) -> dict[str, object]:
    named = names[token]
    return {"token": named.text, "logprob": _number(logprob), "bytes": named.bytes}


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
