"""The tokenizer of the served model: text and conversations to token ids, token ids to text.

Only the gateway knows text; verifiers and drafters see token ids. A text prompt is tokenised as it is given: special tokens are added only
with `--add-special-tokens` or on request. A chat prompt has the special tokens that its template writes.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from gateway.detokenizer import REPLACEMENT, Detokenizer
from gateway.requests import Chat
from rootward.engine import tokenizers
from rootward.engine.tokenizers import BYTE_PIECE, byte_alphabet
from rootward.errors import InvalidRequest, Overloaded, UnsupportedParameter

INLINE_CHARACTERS = 2000  # longest text that is tokenised in the event loop
CHARACTERS_PER_TOKEN = 4  # about, to compare work on token ids with work on texts
LARGE_CHARACTERS = 1 << 16
MAX_CALLS = 64  # queued and running in a pool
NAMED_IN_MESSAGE = 3  # levels of objects with names of fields: message, call, function; keys below are the client's

T = TypeVar("T")


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
    """A Hugging Face tokenizer.

    special_tokens_in_messages: texts of special tokens in messages, tools and variables of the template become those tokens. Otherwise they
    stay text, so that a user's text cannot end a turn or begin one of another role.
    """

    def __init__(self, tokenizer: Any, *, add_special_tokens: bool = False, special_tokens_in_messages: bool = False):
        self._tokenizer, self._backend = tokenizer, _plain_backend(tokenizer)
        self._add_special_tokens = add_special_tokens
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
        names = {str(tokenizer.convert_ids_to_tokens(i)) for i in self.special_ids}
        self._special: re.Pattern[str] | None = None  # the first character of every special token in a text
        if (long := [name for name in names if len(name) > 1]) and not special_tokens_in_messages:
            first = _by_first(long).items()  # the rest by look-ahead, because tokens may overlap
            self._special = re.compile("|".join(f"{re.escape(c)}(?={_any_of(rests)})" for c, rests in first))
        self.num_ids = len(tokenizer)  # ids the tokenizer can decode; the model may have more (padding)
        self.bos_id: int | None = tokenizer.bos_token_id

    @property
    def content_hash(self) -> str:
        """The hash that workers report of their tokenizer."""
        return tokenizers.content_hash(self._tokenizer)

    @property
    def backend_json(self) -> str:
        """The fast tokenizer as JSON, for the compiler of structured outputs; "" for a slow tokenizer."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return str(backend.to_str()) if backend is not None else ""

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Token ids of a prompt. An empty text is the beginning-of-sequence token; InvalidRequest if the model has none."""
        _refuse_lone_surrogates("prompt", text)
        special = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=special))
        if ids:
            return ids
        if self.bos_id is None:
            fix = "is empty and the model has no beginning token; give at least one character"
            raise InvalidRequest("prompt", text, fix)
        return (self.bos_id,)

    def encode_chat(self, chat: Chat) -> tuple[int, ...]:
        """Token ids of a conversation, rendered with the model's template. Errors: those of `render_chat`."""
        chat, cut = self._without_special_tokens(chat)
        text = self.render_chat(chat)
        parts = text.split(cut) if cut else [text]
        return tuple(i for part in parts for i in self._tokenizer.encode(part, add_special_tokens=False))

    def render_chat(self, chat: Chat) -> str:
        """The text of a conversation in the model's template. UnsupportedParameter if the model has none, InvalidRequest for messages
        that do not fit it."""
        messages = chat.messages
        if not getattr(self._tokenizer, "chat_template", None):
            fix = "messages need a chat template, and this model has none; send text"
            raise UnsupportedParameter("messages", len(messages), fix)
        # A client may set variables of the template, never the template or another parameter of this function.
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}
        if own := parameters & chat.template_kwargs.keys():
            raise InvalidRequest("chat.template_kwargs", min(own), "is no variable of the template; leave it out")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **chat.template_kwargs,
            )
        except Exception as error:  # templates are programs of the model's author and may raise any exception
            fix = f"messages do not fit the chat template: {error}"
            raise InvalidRequest("messages", len(messages), fix) from error
        _refuse_lone_surrogates("messages", text)
        return str(text)

    def _without_special_tokens(self, chat: Chat) -> tuple[Chat, str]:
        """(the conversation with a separator after the first character of every special token in its texts, the separator): a text that is
        tokenised in parts, split at the separator, has no special token. ("" if the texts have no special token.)

        The separator is in no text, so different keys of an object stay different."""
        special, texts = self._special, "".join(texts_in([*chat.messages, chat.template_kwargs]))
        if special is None or special.search(texts) is None:
            return chat, ""
        unused = set(map(chr, range(0xE000, 0xF900))).difference(texts)  # for private use: no template has one
        if not unused:
            fix = "have all characters U+E000 to U+F8FF and the text of a special token; leave one out"
            raise InvalidRequest("messages", len(chat.messages), fix)
        cut = min(unused)
        marked = rf"\g<0>{cut}"

        def change(text: str) -> str:
            return special.sub(marked, text)

        messages = tuple(_changed(message, change, num_named=NAMED_IN_MESSAGE) for message in chat.messages)
        variables = _changed(chat.template_kwargs, change, num_named=1)
        return replace(chat, messages=messages, template_kwargs=variables), cut

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the tokenizer (padding of the vocabulary) decode to nothing."""
        known = [i for i in ids if 0 <= i < self.num_ids]
        if self._backend is not None:  # runs once per token, and the wrapper costs ten times as much
            return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))
        text = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def is_token(self, text: str) -> bool:
        """Whether this text was added to the vocabulary, and so is always one token."""
        return text in getattr(self._tokenizer, "added_tokens_encoder", {})

    @property
    def special_texts(self) -> Mapping[str, str | None]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        values = {name: getattr(self._tokenizer, name, None) for name in names}
        return {name: value if isinstance(value, str) else None for name, value in values.items()}

    def token_text(self, token: int) -> str:
        """The text that a token adds to a text. Decoders drop the blank of the first token, so it is decoded behind another one."""
        first, text_of_first = self._first
        text = self.decode([*first, token], skip_special_tokens=False)
        if text.startswith(text_of_first):
            return text[len(text_of_first) :]
        return self.decode([token], skip_special_tokens=False)

    @cached_property
    def _first(self) -> tuple[list[int], str]:
        """(one token that changes no text behind it, its text); ([], "") if the vocabulary has none."""
        for token in range(self.num_ids):
            if token in self.special_ids or BYTE_PIECE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
                continue  # bytes in a row are decoded together
            text = self.decode([token])
            if text.strip() and REPLACEMENT not in text:
                return [token], text
        return [], ""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of `token_text`; None if they are unknown. A part of a character is read from its spelling in the vocabulary."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if text == piece.replace("\u2581", " "):  # SentencePiece's character for a space
            return text.encode()
        if BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:-1], 16)])
        alphabet = byte_alphabet()
        return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else None

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for the output that follows `context`."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return Detokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), context, hidden)


def _by_first(texts: Iterable[str]) -> dict[str, list[str]]:
    """The rests of texts by their first characters."""
    found: dict[str, list[str]] = {}
    for text in sorted(texts):
        found.setdefault(text[:1], []).append(text[1:])
    return found


def _any_of(texts: Sequence[str]) -> str:
    """An expression for the beginning of any of these texts. Each character is looked at once: `re` tries alternatives one by one and keeps
    the interpreter lock, for seconds where a tokenizer has a thousand special tokens."""
    if "" in texts:
        return ""
    parts = [re.escape(first) + _any_of(rests) for first, rests in _by_first(texts).items()]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _plain_backend(tokenizer: Any) -> Any:
    """The fast tokenizer inside, if it does all the decoding; else None."""
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
            fix = "is no token id; this model has no tokenizer, write ids and blanks"
            raise InvalidRequest("prompt", odd[:16], fix)
        if not words:
            raise InvalidRequest("prompt", text[:16], "is empty; give at least one token id")
        return tuple(map(int, words))

    def encode_chat(self, chat: Chat) -> NoReturn:
        """UnsupportedParameter"""
        raise UnsupportedParameter("messages", len(chat.messages), "messages need a tokenizer, and this model has none")

    render_chat = encode_chat

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{i} " for i in ids)

    def is_token(self, text: str) -> bool:
        return False

    @property
    def special_texts(self) -> Mapping[str, str | None]:
        return {}

    def token_text(self, token: int) -> str:
        return f"{token} "

    def token_bytes(self, token: int) -> bytes | None:
        return self.token_text(token).encode()

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self.decode, context)


Tokenizer = HuggingFaceTokenizer | TokenNumbers


class TokenizerPool:
    """Two threads for the tokenisation of long texts and for large answers only, so that other work never waits for it.

    Only one of them takes texts of more than `LARGE_CHARACTERS`, so that shorter ones always find a thread.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._large = asyncio.Semaphore(1)
        self._num_calls = 0

    async def run(self, size: int, call: Callable[..., T], *arguments: object) -> T:
        """The result of `call`, which works on `size` characters. Up to `INLINE_CHARACTERS` it runs in the event loop. Overloaded beyond
        `MAX_CALLS`."""
        if size > INLINE_CHARACTERS and self._num_calls >= MAX_CALLS:
            raise Overloaded(f"{self._num_calls} texts wait for the tokenizer, its limit", retry_after_s=1.0)
        self._num_calls += 1
        try:
            return await self.answer(size, call, *arguments)
        finally:
            self._num_calls -= 1

    async def answer(self, size: int, call: Callable[..., T], *arguments: object) -> T:
        """As `run`, for answers: they are generated already, so they wait, however many calls there are."""
        if size <= INLINE_CHARACTERS:
            return call(*arguments)
        async with self._large if size > LARGE_CHARACTERS else nullcontext():
            work = self._threads.submit(_without_stop_iteration, call, *arguments)
            try:
                return await asyncio.wrap_future(work)
            except asyncio.CancelledError:  # a thread that works on it goes on, and others wait for it
                if not work.done():
                    await asyncio.gather(asyncio.wrap_future(work), return_exceptions=True)
                raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _without_stop_iteration(call: Callable[..., T], *arguments: object) -> T:
    """A future of asyncio cannot hold StopIteration: it would never be done."""
    try:
        return call(*arguments)
    except StopIteration as error:
        raise RuntimeError("a call of the tokenizer raised StopIteration") from error


def _refuse_lone_surrogates(field: str, text: str) -> None:
    """InvalidRequest for halves of UTF-16 pairs, which JSON can spell and UTF-8 cannot."""
    if found := re.search("[\ud800-\udfff]", text):
        raise InvalidRequest(field, found[0], f"at character {found.start()} is a lone surrogate; send valid Unicode")


def texts_in(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys of objects included, in any order."""
    left = [value]  # no recursion: the value may be nested as deeply as json reads, and have a few 100,000 numbers
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            left.extend(one)
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def _changed(fields: Mapping[str, object], change: Callable[[str], str], *, num_named: int) -> dict[str, object]:
    """The object of JSON values with every string changed. num_named: outermost levels of objects whose keys are read by the template and
    stay."""
    return {
        key if num_named else change(key): _mapped(value, change, max(0, num_named - 1))
        for key, value in fields.items()
    }


def _mapped(value: object, change: Callable[[str], str], num_named: int) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return _changed(value, change, num_named=num_named)
    return [_mapped(item, change, num_named) for item in value] if isinstance(value, list) else value
