"""Structured output (JSON schema, regular expression, Lark grammar): which tokens may follow which node of a tree.

The structure is compiled to a matcher of `llguidance` (optional extra `structured`) over the bytes of the model's tokens. The matcher of a
session is at the end of its committed text; a round traverses the tree depth first, with copies, so each row is masked under its own
node's text. A draft token that does not match has probability 0, so no node below it is ever reached.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootward.core.requests import Form, Structure
from rootward.core.tree import TokenTree
from rootward.errors import InvalidGrammar, UnsupportedParameter

MAX_COMPILED = 64  # compiled structures in the cache
# Processor time that following one text may take. The masks of an ambiguous grammar take longer with each token, up to a second a node, in
# which all sessions of the step stand still; those of other forms take less than a millisecond. Time that is not used is not saved.
FREE_S, NODE_S = 1.0, 0.01  # at one time, and for each token and each node of a tree
READ_S = NODE_S / 100  # for each token of a text that is read again
# Bounded runs of whitespace in JSON: without a bound a model can emit whitespace forever.
JSON_DEFAULTS = {"whitespace_pattern": r"[ \t\r\n]{1,16}"}
JSON_RULES = {"lenient": False, "coerce_one_of": False}  # schemas are enforced exactly or refused


class TreeMatcher:
    """A matcher at some point of a text. Not thread-safe. `broken`: why it exceeded its limits; "" if it has not.

    clock: processor time of this thread in seconds."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_ids: frozenset[int],
        *,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher, self._vocab_size, self._end_ids, self._clock = matcher, vocab_size, end_ids, clock
        self._left_s = FREE_S
        self.broken = ""

    def copy(self) -> TreeMatcher:
        return TreeMatcher(self._matcher.deep_copy(), self._vocab_size, self._end_ids, clock=self._clock)

    def advance(self, tokens: Sequence[int], *, token_s: float = NODE_S) -> bool:
        """Consume tokens; False if they do not match, or the text may not end where the first token that ends a generation comes: the mask
        of a node below which nothing fits allows no other. Tokens that end a generation are skipped. token_s: time for each of them."""
        at_end = next((i for i, t in enumerate(tokens) if t in self._end_ids), len(tokens))
        fits = not self.broken and self._consume(tokens[:at_end], token_s)
        if fits and at_end < len(tokens):
            fits = self._matcher.is_accepting() and self._consume(tokens[at_end:], token_s)
        self._notice()
        return fits and not self.broken

    def _consume(self, tokens: Sequence[int], token_s: float) -> bool:
        """One by one: during a call the whole interpreter stands still, and for a long ambiguous text it takes minutes."""
        for token in tokens:
            if token in self._end_ids:
                continue
            with self._timed(token_s):
                fits = self._matcher.try_consume_tokens([int(token)]) == 1
            if not fits or self.broken:
                return False
        return True

    @contextmanager
    def _timed(self, free_s: float) -> Iterator[None]:
        """Around work that may take so long. `broken` afterwards if the work on this text takes longer, by FREE_S in all."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._left_s = min(FREE_S, self._left_s + free_s - (self._clock() - start_s))
            if self._left_s < 0 and not self.broken:
                self.broken = f"takes more than {NODE_S:g} s a token to follow"

    def masks(self, tree: TokenTree) -> NDArray[np.uint8]:
        """[N, 4·⌈V / 32⌉]: which tokens may follow each node, one bit each; all of them after a node that cannot be reached.

        Where the text of a node exceeds the limits only the end of the text may follow it, and those below: a generation that comes there
        is aborted. Other nodes are not concerned, for a draft must not end a text that leaves it.
        """
        words = np.full((len(tree), (self._vocab_size + 31) // 32), -1, dtype=np.int32)
        self._fill(self._matcher, tree, 0, words)
        self._notice()
        return words.view(np.uint8)

    def _fill(self, matcher: Any, tree: TokenTree, node: int, words: NDArray[np.int32]) -> None:
        """Fills the mask of `node`, at which the matcher is, and of all nodes below it. Children have copies of the matcher, because one
        that has exceeded its limits cannot be rolled back. Once all of it has taken too long nothing more is computed: the generation is
        aborted in this round."""
        row = words[node]
        with self._timed(NODE_S):
            if not matcher.is_error() and not self.broken:
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error() or self.broken:
            row[:] = self._end_only()
        children = [child for child in tree.children[node] if int(tree.token[child]) not in self._end_ids]
        for child in children:
            token = int(tree.token[child])
            if self.broken:
                self._fill(matcher, tree, child, words)
                continue
            with self._timed(0.0):
                # A copy takes time in the length of the text, so the last child takes the parent's, unless it is that of the text itself.
                below = matcher if node and child == children[-1] else matcher.deep_copy()
                follows = below.is_error() or below.try_consume_tokens([token]) == 1 or below.is_error()
            if follows:
                self._fill(below, tree, child, words)

    def _end_only(self) -> NDArray[np.int32]:
        """The mask that allows the end of the text alone."""
        allowed = np.zeros(32 * ((self._vocab_size + 31) // 32), dtype=np.uint8)
        allowed[list(self._end_ids)] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _notice(self) -> None:
        if not self.broken and self._matcher.is_error():
            self.broken = str(self._matcher.get_error()).splitlines()[0]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a model: `tokenizer` is an `llguidance.LLTokenizer`, or None if the model has no fast tokenizer."""

    tokenizer: Any | None
    size: int
    eos_ids: tuple[int, ...]


class Grammars:
    """Matchers for the structures of requests, compiled once each. Thread-safe; the vocabulary is read at the first request."""

    def __init__(self, read: Callable[[], Vocabulary]) -> None:
        self._vocabulary, self._lock = cache(read), Lock()
        self._compiled = lru_cache(MAX_COMPILED)(self._compile)

    def matcher(self, wanted: Structure, committed: Iterable[int] = ()) -> TreeMatcher:
        """At the end of `committed`. InvalidGrammar for what does not compile, UnsupportedParameter where nothing can.

        Takes milliseconds, the first time up to seconds: call it on a thread.
        """
        with self._lock:
            matcher = self._compiled(wanted).copy()
        if not matcher.advance(tuple(committed), token_s=READ_S):
            raise InvalidGrammar(wanted.form.value, "committed", matcher.broken or "tokens do not fit it")
        return matcher

    def _compile(self, wanted: Structure) -> TreeMatcher:
        field = wanted.form.value
        library = _library(field)
        v = self._vocabulary()
        if v.tokenizer is None or not v.eos_ids:
            lacks = "tokenizer" if v.tokenizer is None else "end-of-sequence token"
            raise UnsupportedParameter(field, "given", f"needs a model with a fast tokenizer; this one has no {lacks}")
        try:
            matcher = library.LLMatcher(v.tokenizer, _source(library, wanted), log_level=0)
        except ValueError as error:
            raise InvalidGrammar(field, _start(wanted.text), f"does not compile: {_line(error)}") from None
        if matcher.is_error():
            raise InvalidGrammar(field, _start(wanted.text), f"does not compile: {_line(matcher.get_error())}")
        return TreeMatcher(matcher, v.size, frozenset(v.eos_ids))


def vocabulary_of(model: str, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a Hugging Face model; without tokenizer if it has none or only a slow one."""
    from llguidance import LLTokenizer

    from rootward.engine.tokenizers import find_tokenizer, num_ids

    tokenizer = None if model.startswith("tabular:") else find_tokenizer(model)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not eos_ids or num_ids(tokenizer) > vocab_size:
        return Vocabulary(None, vocab_size, tuple(eos_ids))
    made = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_ids))
    return Vocabulary(made, vocab_size, tuple(eos_ids))


def _library(field: str) -> Any:
    try:
        import llguidance
    except ImportError:
        fix = "needs the package llguidance; install rootward[structured] at the verifier"
        raise UnsupportedParameter(field, "given", fix) from None
    return llguidance


def _source(library: Any, wanted: Structure) -> str:
    """The form in the library's own notation."""
    make = library.LLMatcher
    if wanted.form is Form.REGEX:
        return str(make.grammar_from_regex(wanted.text))
    if wanted.form is Form.GRAMMAR:
        return str(make.grammar_from_lark(wanted.text))
    schema = wanted.text or '{"type": "object"}'
    try:
        json.loads(schema)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    return str(make.grammar_from_json_schema(schema, defaults=JSON_DEFAULTS, overrides=JSON_RULES))


def _start(text: str) -> str:
    return text if len(text) <= 32 else text[:31] + "…"


def _line(error: object) -> str:
    """The message on one line: the library's own quote the text and point into it."""
    return " ".join(str(error).split())[:400]
