"""Masks of a tree: at every node those of a matcher that has read that node's text from the beginning."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from support import structured
from support.structured import EOS, TEXTS, VOCAB, allowed, grammars, text

from rootward.core.requests import Form, Structure
from rootward.core.tree import TokenTree, root_only
from rootward.engine.grammar import READ_S, Grammars, TreeMatcher, Vocabulary
from rootward.errors import InvalidGrammar, UnsupportedParameter

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["a", "ab"]}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = {
    "schema": Structure(Form.JSON_SCHEMA, json.dumps(SCHEMA)),
    "object": Structure(Form.JSON_OBJECT),
    "regex": Structure(Form.REGEX, r"-?[0-9]{2,5}(\.[0-9]+)?"),
    "grammar": Structure(Form.GRAMMAR, 'start: "[" item ("," item)* "]"\nitem: /[ab]+/ | start'),
}
# After "a" and some "r" there are more ways to read the text than the matcher follows; after "b" there is one.
NUM_RULES = 60
AMBIGUOUS = 'start: "b"* | "a" x0\n' + "\n".join(
    f'x{i}: "r" | x{(i + 1) % NUM_RULES} x{(i * 7 + 3) % NUM_RULES} | x{(i * 5 + 2) % NUM_RULES} "r" x{(i + 1) % NUM_RULES}'
    for i in range(NUM_RULES)
)


def walk(wanted: Structure, rng: np.random.Generator, length: int) -> list[int]:
    """A random text of the form, up to its end."""
    matcher, tokens = grammars().matcher(wanted), []
    while len(tokens) < length and (not tokens or tokens[-1] != EOS):
        tokens.append(int(rng.choice(np.flatnonzero(allowed(matcher.masks(root_only()))[0]))))
        assert matcher.advance(tokens[-1:])
    return tokens


def tree_below(wanted: Structure, committed: list[int], rng: np.random.Generator, size: int) -> TokenTree:
    """Mostly tokens that fit, some that do not, ends of text too."""
    token, parent, fits = [0], [-1], [True]
    while len(token) < size:
        node = int(rng.integers(len(token)))
        path, at = [], node
        while at:
            path.insert(0, token[at])
            at = parent[at]
        taken = [t for t, p in zip(token, parent, strict=True) if p == node]
        free = sorted(set(range(VOCAB)) - set(taken))
        if (fits[node] and token[node] != EOS) or node == 0:
            legal = allowed(grammars().matcher(wanted, [*committed, *path]).masks(root_only()))[0]
            good = [t for t in free if legal[t]]
            free = good if good and rng.random() < 0.8 else free
        x = int(rng.choice(free))
        token.append(x)
        parent.append(node)
        fits.append(fits[node] and bool(legal[x]) if fits[node] else False)
    return TokenTree(token, parent, [False] * size)


@pytest.mark.parametrize("form", FORMS)
def test_every_node_has_the_mask_of_its_own_text(form: str) -> None:
    source, wanted = grammars(), FORMS[form]
    rng = np.random.default_rng(3)
    reached = 0
    for _ in range(15):
        committed = [t for t in walk(wanted, rng, int(rng.integers(0, 8))) if t != EOS]
        matcher = source.matcher(wanted, committed)
        tree = tree_below(wanted, committed, rng, 10)
        masks = allowed(matcher.masks(tree))
        for node in range(len(tree)):
            try:
                alone = source.matcher(wanted, [*committed, *tree.path(node)])
            except InvalidGrammar:
                assert masks[node].all()  # cannot be reached: its row is not looked at
                continue
            if EOS in tree.path(node):
                continue
            reached += node > 0
            assert (masks[node] == allowed(alone.masks(root_only()))[0]).all()
        assert (allowed(matcher.masks(root_only()))[0] == masks[0]).all()  # the walk left it where it was
    assert reached > 30


@pytest.mark.parametrize("form", FORMS)
def test_texts_of_a_form_have_it(form: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(40):
        tokens = walk(FORMS[form], rng, 400)
        if tokens[-1] != EOS:
            continue  # cut short
        if form in ("schema", "object"):
            value = json.loads(text(tokens))
            assert isinstance(value, dict)
            assert form == "object" or (set(value) == {"a", "b"} and set(value["b"]) <= {"a", "ab"})
        else:
            assert text(tokens)


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        (Structure(Form.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Structure(Form.JSON_SCHEMA, '{"not": {"type": "string"}, "x-guidance": {"lenient": true}}'), "not"),
        (Structure(Form.JSON_SCHEMA, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "oneOf"),
        (Structure(Form.JSON_SCHEMA, '{"type": "string", "format": "moon"}'), "moon"),
        (Structure(Form.JSON_SCHEMA, '{"$ref": "http://example.com/a"}'), "example.com"),
        (Structure(Form.JSON_SCHEMA, "{"), "no JSON"),
        (Structure(Form.JSON_SCHEMA, "[1]"), "object"),
        (Structure(Form.JSON_SCHEMA, "false"), "false"),
        (Structure(Form.REGEX, "("), "unclosed"),
        (Structure(Form.REGEX, "(?=a)b"), "look-around"),
        (Structure(Form.GRAMMAR, "start: nothing"), "nothing"),
    ],
)
def test_what_does_not_compile_is_named(wanted: Structure, word: str) -> None:
    with pytest.raises(InvalidGrammar, match=f"^{wanted.form.value}: .*{word}") as caught:
        grammars().matcher(wanted)
    assert "\n" not in str(caught.value)


def test_committed_text_must_fit() -> None:
    with pytest.raises(InvalidGrammar, match="regex: 'committed' tokens do not fit"):
        grammars().matcher(Structure(Form.REGEX, "[0-9]+"), [TEXTS.index("a")])


@pytest.mark.parametrize("lacking", [Vocabulary(None, 5, (0,)), Vocabulary(object(), 5, ())])
def test_a_model_without_tokenizer_or_end_has_no_forms(lacking: Vocabulary) -> None:
    with pytest.raises(UnsupportedParameter, match=r"^regex: .* needs a model with"):
        Grammars(lambda: lacking).matcher(Structure(Form.REGEX, "a"))


def test_a_copy_does_not_move_the_original() -> None:
    source, wanted = grammars(), FORMS["regex"]
    first = source.matcher(wanted)
    before = first.masks(root_only()).copy()
    assert source.matcher(wanted).advance([TEXTS.index("1"), TEXTS.index("2")])
    assert (first.masks(root_only()) == before).all()


def test_a_form_beyond_the_matcher_s_limits_ends_the_text() -> None:
    """No guess about what may follow: the text ends there, and whoever reads `broken` says that it was aborted."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(structured._Bytes()))
    limits = LLParserLimits(step_lexer_fuel=1)
    source = LLMatcher.grammar_from_json_schema('{"type": "object"}')
    matcher = TreeMatcher(LLMatcher(tokenizer, source, limits=limits, log_level=0), VOCAB, frozenset({EOS}))
    assert not matcher.broken
    first, *text = [TEXTS.index(character) for character in '{"ab']
    assert matcher.advance([first])
    masks = allowed(matcher.masks(TokenTree([0, *text], [-1, 0, 1, 2], [False] * 4)))
    assert matcher.broken
    assert all(np.flatnonzero(row).tolist() == [EOS] for row in masks)
    assert not matcher.advance([EOS])


def test_a_draft_beyond_the_matcher_s_limits_does_not_end_a_text_that_leaves_it() -> None:
    """Its own nodes have the masks of plain decoding, which ends there; all others, the root too, those of their texts."""
    wanted = Structure(Form.GRAMMAR, AMBIGUOUS)
    source, (a, b, r) = grammars(), (TEXTS.index(character) for character in "abr")
    before, matcher = source.matcher(wanted), source.matcher(wanted)
    long = [a, *[r] * 12]
    tree = TokenTree([0, b, *long, b], [-1, 0, 0, *range(2, 1 + len(long)), 1], [False] * (3 + len(long)))
    masks = allowed(matcher.masks(tree))
    assert not matcher.broken
    assert (masks[0] == allowed(before.masks(root_only()))[0]).all()
    broken = 0
    for node in range(1, len(tree)):
        alone = source.matcher(wanted)
        fits = alone.advance(tree.path(node))
        assert fits or alone.broken
        wants = allowed(alone.masks(root_only()))[0]
        broken += bool(alone.broken)
        assert (masks[node] == wants).all()
    assert 0 < broken < len(long)
    assert matcher.advance([b] * 20)


class Slow:
    """A matcher of which each call takes so many seconds of processor time; `clock` reads it."""

    def __init__(self, call_s: float) -> None:
        self.call_s, self.used_s, self.num_masks, self.num_copies = call_s, 0.0, 0, 0
        self.token_s = 0.0  # of each token of a call that consumes some
        self.longest = 0  # most tokens of one call

    def clock(self) -> float:
        return self.used_s

    def deep_copy(self) -> Slow:
        self.num_copies += 1
        return self

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        self.used_s += self.call_s
        self.num_masks += 1

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.used_s += self.token_s * len(tokens)
        self.longest = max(self.longest, len(tokens))
        return len(tokens)


@pytest.mark.parametrize("depth", [1, 16])
def test_a_form_that_takes_too_long_to_follow_is_given_up(depth: int) -> None:
    """Its masks are computed between the steps of all other sessions: those of an ambiguous grammar took a second for each node."""
    chain = TokenTree([TEXTS.index("a")] * depth, range(-1, depth - 1), [False] * depth)
    slow = Slow(0.3)
    matcher = TreeMatcher(slow, VOCAB, frozenset({EOS}), clock=slow.clock)
    for _ in range(8):
        masks = allowed(matcher.masks(chain))
    assert slow.num_masks == 4  # the fourth uses up what is free
    assert matcher.broken
    assert np.flatnonzero(masks[-1]).tolist() == [EOS]
    assert not matcher.advance([TEXTS.index("a")])


def test_a_form_that_takes_long_once_is_followed_on() -> None:
    slow = Slow(0.9)
    matcher = TreeMatcher(slow, VOCAB, frozenset({EOS}), clock=slow.clock)
    matcher.masks(root_only())
    slow.call_s = 0.005
    for _ in range(1000):
        matcher.masks(root_only())
        assert matcher.advance([TEXTS.index("a")])
    assert not matcher.broken


def test_a_text_that_takes_too_long_to_read_again_is_refused() -> None:
    """A client may say what the output was so far. An ambiguous form took minutes for a thousand tokens of it, in which the interpreter
    stood still."""
    slow = Slow(0.0)
    slow.token_s = 0.3
    matcher = TreeMatcher(slow, VOCAB, frozenset({EOS}), clock=slow.clock)
    assert not matcher.advance([TEXTS.index("a")] * 1000, token_s=READ_S)
    assert matcher.broken
    assert slow.used_s < 2.0
    assert slow.longest == 1


def test_the_real_matcher_reads_an_ambiguous_text_within_its_limits() -> None:
    wanted = Structure(Form.GRAMMAR, 'start: s\ns: "a" | s s | s s s')
    start_s = time.thread_time()
    with pytest.raises(InvalidGrammar, match="grammar: 'committed' takes more than"):
        grammars().matcher(wanted, [TEXTS.index("a")] * 400)
    assert time.thread_time() - start_s < 5.0


def test_time_that_was_not_used_is_not_saved() -> None:
    """Otherwise a long text of an easy form would pay for minutes of a hard one."""
    slow = Slow(0.001)
    matcher = TreeMatcher(slow, VOCAB, frozenset({EOS}), clock=slow.clock)
    for _ in range(2000):
        matcher.masks(root_only())
        assert matcher.advance([TEXTS.index("a")])
    slow.call_s, slow.num_masks = 0.3, 0
    for _ in range(10):
        matcher.masks(root_only())
    assert slow.num_masks == 4
    assert matcher.broken


def test_a_chain_takes_one_copy() -> None:
    """A copy takes time in the length of the text."""
    slow = Slow(0.0)
    matcher = TreeMatcher(slow, VOCAB, frozenset({EOS}), clock=slow.clock)
    a = TEXTS.index("a")
    matcher.masks(TokenTree([a] * 16, range(-1, 15), [False] * 16))
    assert slow.num_copies == 1
    slow.num_copies = 0
    matcher.masks(TokenTree([a, a, a + 1, a, a + 1], [-1, 0, 0, 1, 1], [False] * 5))
    assert slow.num_copies == 3
