"""The tokenizer of the served model, as the gateway uses it. Only the gateway knows text; below it there are token ids.

A prompt's text is tokenised exactly as given: no beginning-of-sequence token is put before it unless the gateway runs with
`--add-special-tokens` or a tokenize call asks for it. A chat prompt carries the special tokens its template writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from gateway.detokenizer import REPLACEMENT, Detokenizer
from rootward.errors import ConfigurationError, InvalidRequest, UnsupportedParameter

_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")

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


class Tokenizer(Protocol):
    """What the gateway asks of a tokenizer."""

    @property
    def content_hash(self) -> str:
        """Hash of what decides between text and ids; "" without a vocabulary."""

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @property
    def special_texts(self) -> Mapping[str, str | None]:
        """`eos_token` and its kind, and the chat template."""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text; None where that cannot be said."""

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer: ...


def load_tokenizer(model: str, *, add_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer in a folder or of a hub name. ConfigurationError when there is none."""
    if model.startswith("tabular:"):
        return TokenNumbers()
    if _is_path(model) and not Path(model).is_dir():
        raise ConfigurationError(f"model: {model!r} is not a folder; give a Hugging Face model folder or hub name")
    from transformers import AutoTokenizer  # takes seconds: only processes that tokenise pay for it

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises many kinds, and none is a bug of ours
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(f"model: {model!r} has no usable tokenizer ({first_line})") from error
    return HuggingFaceTokenizer(tokenizer, add_special_tokens=add_special_tokens)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer behind the five calls that the gateway needs."""

    def __init__(self, tokenizer: Any, *, add_special_tokens: bool = False):
        self._tokenizer, self._backend = tokenizer, _plain_backend(tokenizer)
        self._add_special_tokens = add_special_tokens
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
        self.num_ids = len(tokenizer)  # ids the tokenizer can decode; the model may have more (padding)
        self.bos_id: int | None = tokenizer.bos_token_id

    @property
    def content_hash(self) -> str:
        """The same hash that workers tell of their tokenizer."""
        from rootward.engine.tokenizers import content_hash

        return content_hash(self._tokenizer)

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
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, rendered with the model's own template."""
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
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the tokenizer (padding of the vocabulary) decode to nothing."""
        known = [i for i in ids if 0 <= i < self.num_ids]
        if self._backend is not None:  # once per token: what lies above it costs ten times as much
            return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))
        text = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

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
        if _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:-1], 16)])
        alphabet = _byte_alphabet()
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
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """Refused."""
        raise UnsupportedParameter("messages", len(messages), "messages need a tokenizer, and this model has none")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{i} " for i in ids)

    @property
    def special_texts(self) -> Mapping[str, str | None]:
        return {}

    def token_bytes(self, token: int) -> bytes | None:
        return f"{token} ".encode()

    def detokenizer(self, context: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self.decode, context)


@cache
def _byte_alphabet() -> dict[str, int]:
    """The letters with which byte-level vocabularies spell bytes: printable ones stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _refuse_lone_surrogates(field: str, text: str) -> None:
    """JSON can spell halves of UTF-16 pairs; they are no text."""
    at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
    if at is not None:
        raise InvalidRequest(field, text[at], f"at character {at} is a lone surrogate; send valid Unicode")


def _is_path(model: str) -> bool:
    """A hub name is `owner/name` or `name`; anything that starts like a path or has more parts is a folder."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists()
