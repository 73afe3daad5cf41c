"""Text and token ids: the tokenizer of the served model, incremental detokenisation, and output cut at stop strings.

Only the gateway knows text; below it there are token ids. A text prompt is tokenised exactly as given: no beginning-of-sequence token is
put before it unless the gateway runs with `--add-special-tokens` or a tokenize call asks for it. A chat prompt carries the special tokens
that its template writes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rootward.core.requests import TokenLogprob
from rootward.engine import tokenizers
from rootward.engine.tokenizers import BYTE_PIECE, byte_alphabet
from rootward.errors import InvalidRequest, Overloaded, UnsupportedParameter

INLINE_CHARACTERS = 2000  # up to which a text is tokenised in the loop
LARGE_CHARACTERS = 1 << 16
MAX_CALLS = 64  # at or before the threads of a pool

T = TypeVar("T")


# Parameters of `apply_chat_template` itself. A client may set variables of the template, never the template.
_TEMPLATE_OPTIONS = {
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "conversation",
}
REPLACEMENT = "\ufffd"  # what decoders put where bytes are no character (yet)
_LONGEST_CHARACTER = (
    8  # tokens after which bytes that are no character are taken for broken ones; UTF-8 needs at most 4
)
_MOVE_AT = 24  # tokens in the window before it moves on
_MOVE_ANYWAY_AT = 64  # the same where no clean end was seen
_OVERLAP = 4  # fewest tokens that stay in the window
_CONTEXT = 8  # tokens of the prompt that the first output token is decoded with
PART = 32  # tokens


def load_tokenizer(
    model: str, *, add_special_tokens: bool = False, special_tokens_in_messages: bool = False
) -> Tokenizer:
    """The tokenizer in a folder or of a hub name. ConfigurationError when there is none."""
    if model.startswith("tabular:"):
        return TokenNumbers()
    return HuggingFaceTokenizer(
        tokenizers.load_tokenizer(model),
        add_special_tokens=add_special_tokens,
        special_tokens_in_messages=special_tokens_in_messages,
    )


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer behind the five calls that the gateway needs."""

    def __init__(self, tokenizer: Any, *, add_special_tokens: bool = False, special_tokens_in_messages: bool = False):
        """special_tokens_in_messages: texts of special tokens in messages become those tokens; otherwise they stay text, so that
        what a user writes cannot end a turn or begin one of another role."""
        self._tokenizer, self._backend = tokenizer, _plain_backend(tokenizer)
        self._add_special_tokens = add_special_tokens
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
        names = {str(tokenizer.convert_ids_to_tokens(i)) for i in self.special_ids}
        escaped = "|".join(re.escape(name) for name in sorted(names) if len(name) > 1)
        # Before every special token, also where two of them overlap.
        self._special = (
            re.compile(f"(?={escaped})(.)", re.DOTALL) if escaped and not special_tokens_in_messages else None
        )
        self.num_ids = len(tokenizer)  # ids the tokenizer can decode; the model may have more (padding)
        self.bos_id: int | None = tokenizer.bos_token_id

    @property
    def content_hash(self) -> str:
        """The same hash that workers tell of their tokenizer."""
        return tokenizers.content_hash(self._tokenizer)

    @property
    def backend_json(self) -> str:
        """For the compiler of structured outputs; "" where only a slow tokenizer is there."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return str(backend.to_str()) if backend is not None else ""

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Token ids of a prompt. An empty text is the beginning-of-sequence token, or refused where there is none."""
        _refuse_lone_surrogates("prompt", text)
        special = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=special))
        if ids:
            return ids
        if self.bos_id is None:
            raise InvalidRequest(
                "prompt", text, "is empty and the model has no beginning token; give at least one character"
            )
        return (self.bos_id,)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, rendered with the model's own template."""
        messages, cut = self._without_special_tokens(messages)
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        parts = text.split(cut) if cut else [text]
        return tuple(i for part in parts for i in self._tokenizer.encode(part, add_special_tokens=False))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation in the model's own template. UnsupportedParameter if it has none, InvalidRequest for messages
        that do not fit it."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise UnsupportedParameter(
                "messages", len(messages), "messages need a chat template, and this model has none; send text"
            )
        own = set(template_kwargs or {}) & _TEMPLATE_OPTIONS
        if own:
            raise InvalidRequest("chat.template_kwargs", min(own), "is no variable of the template; leave it out")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **dict(template_kwargs or {}),
            )
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise InvalidRequest(
                "messages", len(messages), f"messages do not fit the chat template: {error}"
            ) from error
        _refuse_lone_surrogates("messages", text)
        return str(text)

    def _without_special_tokens(
        self, messages: Sequence[Mapping[str, object]]
    ) -> tuple[Sequence[Mapping[str, object]], str]:
        """The messages with a character that none of them has after the first character of every special token, and this character:
        what is tokenised apart on both sides of it is no special token. ("" if there is nothing to cut.)"""
        special, texts = self._special, "".join(texts_in(list(messages)))
        if special is None or special.search(texts) is None:
            return messages, ""
        cut = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in texts)  # for private use: no template has one
        marked = rf"\1{cut}"

        def change(text: str) -> str:
            return special.sub(marked, text)

        return [{key: _mapped(value, change) for key, value in message.items()} for message in messages], cut

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the tokenizer (padding of the vocabulary) decode to nothing."""
        known = [i for i in ids if 0 <= i < self.num_ids]
        if self._backend is not None:  # once per token: what lies above it costs ten times as much
            return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))
        text = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def is_token(self, text: str) -> bool:
        """Whether this text is always one token, which was added to the vocabulary."""
        return text in getattr(self._tokenizer, "added_tokens_encoder", {})

    @property
    def special_texts(self) -> Mapping[str, str | None]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        values = {name: getattr(self._tokenizer, name, None) for name in names}
        return {name: value if isinstance(value, str) else None for name, value in values.items()}

    def token_bytes(self, token: int) -> bytes | None:
        """Those of a part of a character are read off the vocabulary, which spells bytes in one of two ways."""
        text = self.decode([token], skip_special_tokens=False)
        if REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:-1], 16)])
        alphabet = byte_alphabet()
        return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else None

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokeniser for the output that follows `context`."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return Detokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), context, hidden)


def _plain_backend(tokenizer: Any) -> Any:
    """The fast tokenizer inside, where decoding is its own and nothing on top of it; else None."""
    from transformers import PreTrainedTokenizerFast

    own = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    return tokenizer.backend_tokenizer if own else None


class TokenNumbers:
    """For models without a tokenizer (`tabular:…`): a text is its token ids, each followed by a blank."""

    content_hash = ""
    backend_json = ""

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """The numbers in the text."""
        words = text.split()
        odd = next((w for w in words if not (w.isascii() and w.isdecimal() and len(w) < 10)), None)
        if odd is not None:
            raise InvalidRequest(
                "prompt", odd[:16], "is no token id; this model has no tokenizer, write ids and blanks"
            )
        if not words:
            raise InvalidRequest("prompt", text[:16], "is empty; give at least one token id")
        return tuple(map(int, words))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """Refused."""
        raise UnsupportedParameter("messages", len(messages), "messages need a tokenizer, and this model has none")

    def render_chat(self, messages: Sequence[Mapping[str, object]], **options: object) -> str:
        """Refused."""
        raise UnsupportedParameter("messages", len(messages), "messages need a tokenizer, and this model has none")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{i} " for i in ids)

    def is_token(self, text: str) -> bool:
        return False

    @property
    def special_texts(self) -> Mapping[str, str | None]:
        return {}

    def token_bytes(self, token: int) -> bytes | None:
        return f"{token} ".encode()

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self.decode, context)


Tokenizer = HuggingFaceTokenizer | TokenNumbers


class TokenizerPool:
    """Threads for what the tokenizer does with long texts, and no others: work elsewhere never waits for it.

    One text of more than `LARGE_CHARACTERS` is worked on at a time, so that short ones always find a thread. Beyond `MAX_CALLS`
    the next one is Overloaded."""

    def __init__(self, num_threads: int = 2):
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._large = asyncio.Semaphore(max(1, num_threads - 1))
        self._num_calls = 0

    async def run(self, size: int, call: Callable[..., T], *arguments: object) -> T:
        """The result of `call`. `size`: characters; below `INLINE_CHARACTERS` it is called at once, in the loop."""
        if size <= INLINE_CHARACTERS:
            return call(*arguments)
        if self._num_calls >= MAX_CALLS:
            raise Overloaded(f"{self._num_calls} texts wait for the tokenizer, its limit", retry_after_s=1.0)
        self._num_calls += 1
        try:
            async with self._large if size > LARGE_CHARACTERS else nullcontext():
                return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        finally:
            self._num_calls -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _refuse_lone_surrogates(field: str, text: str) -> None:
    """JSON can spell halves of UTF-16 pairs; they are no text."""
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
    if at is not None:
        raise InvalidRequest(field, text[at], f"at character {at} is a lone surrogate; send valid Unicode")


def texts_in(value: object) -> Iterator[str]:
    """Every text in a JSON value but the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(item)


def _mapped(value: object, change: Callable[[str], str]) -> object:
    """The JSON value with every text in it changed, but the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


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
        self._min_tokens_left = min_tokens  # tokens still to come whose text completes no stop
        self._stop_free = 0  # characters held that complete no stop
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
            if self._min_tokens_left:
                self._min_tokens_left -= 1
                self._stop_free = len(self._text())
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
        match = find_stop(self._text(), self._stops, self._stop_free)
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
        self._stop_free = max(0, self._stop_free - sum(len(span.text) for span in out))
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
