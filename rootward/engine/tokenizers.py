"""Loading tokenizers, hashing and comparing them by content, and the text of each token."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rootward.errors import ConfigurationError, first_line

BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte in a vocabulary of pieces of text


class TokenDifference(NamedTuple):
    """The smallest id that two tokenizers read differently. A text is None where a tokenizer lacks the id."""

    id: int
    a: str | None
    b: str | None


def is_path(spec: str) -> bool:
    """A hub name is `owner/name` or `name`; what starts like a path or has more parts is a folder."""
    return spec.startswith(("/", "./", "../", "~")) or spec.count("/") > 1


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub name; ConfigurationError (exit code 2) if there is none."""
    if is_path(path) and not Path(path).expanduser().is_dir():
        raise ConfigurationError(f"model: {path!r} is not a folder; give a Hugging Face model folder or hub name")
    try:
        if _names_no_class(Path(path).expanduser()):
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        else:
            # Imports torch: four seconds, and 350 MB for as long as the process runs.
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as wrong:
        raise ConfigurationError(
            f"tokenizer: none at {path!r} ({first_line(wrong)}); check the path or name"
        ) from wrong
    # For a folder without tokenizer files transformers returns a tokenizer of special tokens only.
    if len(tokenizer.get_vocab()) <= len(getattr(tokenizer, "added_tokens_decoder", ())):
        raise ConfigurationError(f"tokenizer: none at {path!r}; save one beside the model with save_pretrained")
    return tokenizer


def _names_no_class(folder: Path) -> bool:
    """Whether `tokenizer.json` says all about a folder's tokenizer: no class of a certain model is named, and no other format is there."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = config.get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False
    is_plain = named in ("PreTrainedTokenizerFast", "TokenizersBackend") and "auto_map" not in config
    return is_plain and (folder / "tokenizer.json").is_file() and not (folder / "tekken.json").exists()


def find_tokenizer(path: str) -> Any | None:
    """As `load_tokenizer`, but None if there is none: a model without one is served with token ids only. A damaged one is not none."""
    try:
        return load_tokenizer(path)
    except ConfigurationError:
        if (Path(path).expanduser() / "tokenizer.json").is_file():
            raise
        return None


def num_ids(tokenizer: Any) -> int:
    """1 + the largest id: ids from here on are padding of the model's vocabulary."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def content_hash(tokenizer: Any) -> str:
    """sha256 over everything that maps text to ids: vocabulary, merges, normaliser, pre-tokenizer. Independent of the file layout."""
    content: dict[str, Any] = {"vocab": sorted((i, t) for t, i in tokenizer.get_vocab().items())}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        whole = json.loads(backend.to_str())
        model = whole.get("model") or {}
        content["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or []]
        content["kind"] = model.get("type")
        content["steps"] = [whole.get("normalizer"), whole.get("pre_tokenizer")]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def first_difference(a: Any, b: Any) -> TokenDifference | None:
    """The smallest id whose text differs; padding of the vocabulary is ignored. None if there is no difference."""
    text_a, text_b = ({i: t for t, i in tokenizer.get_vocab().items()} for tokenizer in (a, b))
    for i in range(max([*text_a, *text_b], default=-1) + 1):
        if text_a.get(i) != text_b.get(i):
            return TokenDifference(i, text_a.get(i), text_b.get(i))
    return None


def token_texts(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of text of each id; special tokens by their names."""
    added = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str()).get("decoder")
    is_byte_level = '"ByteLevel"' in json.dumps(decoder)

    def text(piece: str) -> bytes:
        if BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:-1], 16)])
        if is_byte_level and set(piece) <= byte_alphabet().keys():
            return bytes(byte_alphabet()[letter] for letter in piece)
        return piece.replace("\u2581", " ").encode(errors="replace")  # SentencePiece's character for a space

    own = {i: text(piece) for piece, i in tokenizer.get_vocab().items() if i not in added}
    return own | {i: content.encode() for i, content in added.items()}


@cache
def byte_alphabet() -> dict[str, int]:
    """The character of each byte in byte-level vocabularies: printable bytes are themselves, the others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
