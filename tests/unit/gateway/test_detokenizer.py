"""Pieces given token by token are together the decoded text, whatever the tokens."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.gateway.tokenizers_for_tests import byte_level, sentence_piece

from gateway.detokenizer import _MOVE_ANYWAY_AT, Detokenizer

TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab 😀👨‍👩‍👧é́ह日")), max_size=60)

# Characters of one byte, of several, and U+FFFD itself, which looks like a broken byte.
LONG_TEXTS = st.lists(
    st.sampled_from(["\n", "\t", "a", "b ", "the cat ", "é", "日", "✅", "😀", "\ufffd" * 4 + "a"]), max_size=120
)


def pieces(tokenizer, ids, context=(), **options):
    stream = tokenizer.detokenizer(context, **options)
    return [*(stream.push(i) for i in ids), stream.flush()]


@given(st.lists(st.integers(0, 329), max_size=120))
@settings(max_examples=400, deadline=None)
def test_random_bytes_equal_the_full_decode(ids):
    tokenizer = byte_level()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [byte_level, sentence_piece])
@given(LONG_TEXTS.map("".join))
@example(
    "a" * 20 + "\n✅ ab"
)  # the window moves inside the character, whose first byte turns the line break into a mark
@example("\ufffd" * 4 + "abababab")
@settings(max_examples=200, deadline=None)
def test_long_texts_equal_the_full_decode(tokenizer, text):
    ids = tokenizer().encode(text)
    assert "".join(pieces(tokenizer(), ids)) == tokenizer().decode(ids)


@pytest.mark.parametrize("end", ["\n✅ ab", "\t\n日 ab", "é\n日\n😀\nab", "\n\ufffd\n日ab"])
@pytest.mark.parametrize("length", range(70))
def test_a_line_break_before_the_bytes_of_a_character_is_returned_once(end, length):
    """A byte-fallback decoder writes both as marks until the character is whole; the window has any length at that time."""
    tokenizer = sentence_piece()
    text = "a" * length + end
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


def is_subsequence(text, of):
    rest = iter(of)
    return all(character in rest for character in text)


@given(st.lists(st.sampled_from(["\n", "a", "b", "日", "✅" * 20, b"\x80", b"\xff" * 9, b"\x80" * 62]), max_size=60))
@example([b"\xff" * 9, "✅" * 20, "a"])
@example([b"\x80" * 62, "✅" * 20, "b", "b", "\n", "✅" * 20])
@settings(max_examples=300, deadline=None)
def test_broken_bytes_neither_repeat_nor_remove_other_text(parts):
    """Whole characters next to broken bytes may become marks: the decoder writes a row of bytes with one that is broken as marks."""
    tokenizer = sentence_piece()
    first = tokenizer.encode("\n")[-1] - ord("\n")  # id of the byte 0
    ids = []
    for part in parts:  # a text without the blank that `encode` puts before it, which would end a row of bytes
        ids += tokenizer.encode(part)[1:] if isinstance(part, str) else [first + byte for byte in part]
    shown, least = ("".join(text).replace("\ufffd", "") for text in (pieces(tokenizer, ids), tokenizer.decode(ids)))
    assert is_subsequence(least, shown)
    assert is_subsequence(shown, "".join(part for part in parts if isinstance(part, str)))


@pytest.mark.parametrize("prompt", ["", "日", "the cat日"])
def test_a_broken_byte_is_one_mark_and_nothing_of_the_text_before_it(prompt):
    tokenizer = sentence_piece()
    before, (part, *rest) = tokenizer.encode(prompt), tokenizer.encode("a✅")[-3:]
    assert "".join(pieces(tokenizer, [part, *tokenizer.encode("a")], before)) == "\ufffd a"
    assert "".join(pieces(tokenizer, [part, *rest, part], before)) == "✅\ufffd"


@given(TEXTS, st.integers(0, 30))
@example("0000\x80\x80\x80\x80 \u0900", 13)  # the prompt ends with a token of a blank and the first byte of a character
@settings(max_examples=300, deadline=None)
def test_text_behind_a_prompt(text, at):
    tokenizer = byte_level()
    ids = tokenizer.encode(text + "x")
    prompt, output = ids[:at], ids[at:]
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    while not whole.startswith(before):  # a character that is cut is of the output; U+FFFD itself is of the prompt
        before = before[:-1]
    assert "".join(pieces(tokenizer, output, prompt)) == whole[len(before) :]


@pytest.mark.parametrize("tokenizer", [byte_level, sentence_piece])
@pytest.mark.parametrize("prompt", ["the \ufffd", "the \ufffd\ufffd", "\ufffd"])
@pytest.mark.parametrize("output", ["a", "日a", "\ufffda"])
def test_a_mark_that_ends_the_prompt_is_not_of_the_output(tokenizer, prompt, output):
    """U+FFFD itself, as in a prompt with text that was broken before, not the first bytes of a character."""
    before = tokenizer().encode(prompt)
    ids = tokenizer().encode(prompt + output)[len(before) :]
    assert "".join(pieces(tokenizer(), ids, before)) == output


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("prompt", ["the 日本語", "日本語日本語", "é😀😀日", "the cat 日"])
@pytest.mark.parametrize("output", ["a.", "本a", "😀"])
def test_a_prompt_that_ends_with_bytes(prompt, output, cut):
    """The text of the output does not depend on where in the row of bytes the prompt is looked at, nor on where it ends."""
    tokenizer = sentence_piece()
    ids = tokenizer.encode(prompt + output)
    at = len(tokenizer.encode(prompt)) - cut
    whole = prompt[:-1] if cut else prompt
    assert "".join(pieces(tokenizer, ids[at:], ids[:at])) == tokenizer.decode(ids)[len(whole) :]


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_a_piece_never_ends_inside_a_character(text):
    tokenizer = byte_level()
    assert all("\ufffd" not in p for p in pieces(tokenizer, tokenizer.encode(text + "x"))) or "\ufffd" in text


@pytest.mark.parametrize("text", ["the cat sat 😀 sats.", "😀😀😀", "日本語 the cat"])
def test_byte_fallback_and_leading_blanks(text):
    tokenizer = sentence_piece()
    prompt, output = tokenizer.encode("the cat"), tokenizer.encode(text)
    assert "".join(pieces(tokenizer, output)) == tokenizer.decode(output) == text
    assert "".join(pieces(tokenizer, output, prompt)) == " " + text


def test_special_tokens_are_hidden_or_shown():
    tokenizer = byte_level()
    (end,) = tokenizer.special_ids
    ids = [*tokenizer.encode("ab"), end, *tokenizer.encode("c")]
    assert "".join(pieces(tokenizer, ids)) == "abc"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "ab<|end|>c"


class CountingDecode:
    """longest: most tokens that were decoded in one call."""

    def __init__(self, tokenizer):
        self._tokenizer, self.longest = tokenizer, 0

    def __call__(self, ids):
        self.longest = max(self.longest, len(ids))
        return self._tokenizer.decode(ids)


def test_the_window_stays_short():
    tokenizer = byte_level()
    decode = CountingDecode(tokenizer)
    stream = Detokenizer(decode)
    broken = tokenizer.encode("é")[0:1] * 300  # bytes that never become a character
    for token in [*tokenizer.encode("the stop string " * 50), *broken]:
        stream.push(token)
    assert decode.longest <= _MOVE_ANYWAY_AT


@pytest.mark.parametrize(
    "text", ["日本" * 200, "\n日" * 200, "\ufffd" * 200, "a" * 20 + "\ufffd" * 200 + "the cat " * 50]
)
def test_the_window_stays_short_in_rows_of_bytes(text):
    tokenizer = sentence_piece()
    decode = CountingDecode(tokenizer)
    stream = Detokenizer(decode)
    ids = tokenizer.encode(text)
    for token in [*ids, *ids[-1:], *[tokenizer.encode("é")[-2]] * 300]:
        stream.push(token)
    assert decode.longest <= _MOVE_ANYWAY_AT


@pytest.mark.parametrize("before", ["", "the ", "日本"])
def test_tokens_without_text_do_not_pile_up_in_the_window(before):
    """Padding of the vocabulary has ids that the tokenizer does not know: each of them was decoded with all those before it."""
    tokenizer = byte_level()
    decode = CountingDecode(tokenizer)
    stream = Detokenizer(decode)
    ids = [*tokenizer.encode(before), *[10**6] * 300, *tokenizer.encode("é stop")] if before else [10**6] * 300
    text = "".join([*(stream.push(token) for token in ids), stream.flush()])
    assert text == tokenizer.decode(ids)
    assert decode.longest <= _MOVE_ANYWAY_AT


@pytest.mark.parametrize("in_prompt", [False, True])
@pytest.mark.parametrize("before", ["", "the "])
def test_tokens_without_text_do_not_pile_up_behind_a_part_of_a_character(before, in_prompt):
    """The text of the window ends with a replacement mark (U+FFFD) until the rest of the character comes."""
    tokenizer = byte_level()
    decode = CountingDecode(tokenizer)
    part, rest = tokenizer.encode("日")[:1], tokenizer.encode("日 stop")[1:]
    prompt = [*tokenizer.encode(before), *part] if in_prompt else []
    ids = [*([] if in_prompt else [*tokenizer.encode(before), *part]), *[10**6] * 300, *rest]
    stream = Detokenizer(decode, prompt)
    text = "".join([*(stream.push(token) for token in ids), stream.flush()])
    assert text == (before if not in_prompt else "") + "日 stop"
    assert decode.longest <= _MOVE_ANYWAY_AT
