"""Stop strings: found across tokens, held back as long as needed and no longer, text and ids cut at the same place."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.gateway.tokenizers_for_tests import byte_level

from gateway.detokenizer import Output, Span, find_stop, held_back, text_of

TEXT = st.text("ab😀c", max_size=40)
STOPS = st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=3)


def output(stops, **options):
    return Output(byte_level().detokenizer(()), stops, **options)


def in_runs(ids, sizes):
    """The ids in runs of the sizes given, repeated."""
    sizes = itertools.cycle(sizes)
    while ids:
        n = next(sizes)
        yield ids[:n]
        ids = ids[n:]


def run(out, ids, sizes=(1,)):
    spans = []
    for tokens in in_runs(list(ids), sizes):
        spans += out.push(tokens, [True] * len(tokens))
        if out.stop is not None:
            break
    return spans + out.finish()


def naive(text, stops):
    """Read one character after another until the text ends with a stop."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@given(TEXT, STOPS, st.lists(st.sampled_from([1, 2, 3, 5, 7, 33, 200]), min_size=1, max_size=4))
@settings(max_examples=500, deadline=None)
def test_equals_the_naive_search_for_every_chunking(text, stops, sizes):
    ids = byte_level().encode(text or "c")
    text = text or "c"
    spans = run(output(stops), ids, sizes)
    assert "".join(s.text for s in spans) == naive(text, stops)
    assert [s.token for s in spans] == list(ids[: len(spans)])


@given(TEXT, STOPS)
@settings(max_examples=300, deadline=None)
def test_ids_are_the_tokens_whose_text_begins_before_the_cut(text, stops):
    text += "c"
    ids = byte_level().encode(text)
    spans = run(output(stops), ids)
    cut, plain = naive(text, stops), run(output(()), ids)
    begins = itertools.accumulate((len(s.text) for s in plain), initial=0)
    expected = len(plain) if cut == text else sum(b < len(cut) for b, _ in zip(begins, plain, strict=False))
    assert len(spans) == expected


@given(st.text("ab", max_size=12), STOPS)
def test_held_back_is_the_longest_possible_beginning(text, stops):
    wanted = max((n for s in stops for n in range(len(s)) if n <= len(text) and text.endswith(s[:n])), default=0)
    assert held_back(text, stops) == wanted


def test_first_complete_stop_wins_and_of_those_the_longest():
    assert find_stop("xabc", ["abc", "b"]).stop == "b"
    assert find_stop("xabc", ["bc", "abc"]).stop == "abc"
    assert find_stop("xabc", ["z"]) is None


def test_nothing_that_may_become_a_stop_is_released():
    tokenizer, out = byte_level(), output(["END"])
    seen = "".join(s.text for t in tokenizer.encode("aEN") for s in out.push([t], [True]))
    assert seen == "a"
    seen += "".join(s.text for t in tokenizer.encode("Xb") for s in out.push([t], [True]))
    assert seen == "aENXb"


def test_include_stop_keeps_it():
    ids = byte_level().encode("abcEND and more")
    assert "".join(s.text for s in run(output(["END"], include_stop=True), ids)) == "abcEND"


def test_flags_stay_with_their_tokens():
    ids = byte_level().encode("abcENDx")
    flags = [i % 2 == 0 for i in range(len(ids))]
    out = output(["END"])
    spans = out.push(ids, flags)
    assert [s.accepted for s in spans] == flags[: len(spans)]
    assert out.stop == "END"
    assert out.finish(Span(0, "", False)) == []


def test_a_broken_character_at_the_end_comes_out_before_the_hidden_token():
    ids = byte_level().encode("a😀")[:-1]
    out = output(())
    spans = out.push(ids, [True] * len(ids)) + out.finish(Span(0, "", False))
    assert "".join(s.text for s in spans) == "a\ufffd"
    assert [s.token for s in spans] == [*ids, 0]


def test_the_text_looked_at_stays_short_in_a_long_run(monkeypatch):
    looked_at = []

    def find(text, stops, after=0):
        looked_at.append(len(text))
        return find_stop(text, stops, after)

    monkeypatch.setattr("gateway.detokenizer.find_stop", find)
    out, ids = output(["never"]), byte_level().encode("abc " * 2000)
    spans = out.push(ids, [False] * len(ids)) + out.finish()
    assert "".join(s.text for s in spans) == "abc " * 2000
    assert max(looked_at) < 200


def test_tokens_without_text_are_not_looked_at_again_with_each_token(monkeypatch):
    """A client may have a model write special tokens only, or resume after 100,000 of them: the gateway stood still for seconds."""
    joined = 0

    def counted(spans):
        nonlocal joined
        joined += len(spans)
        return text_of(spans)

    monkeypatch.setattr("gateway.detokenizer.text_of", counted)
    (end,) = byte_level().special_ids
    a, b, c = (byte_level().encode(letter)[0] for letter in "abc")
    ids = [a, *[end] * 3000, b, c]
    out = output(["abd"])
    spans = [span for token in ids for span in out.push([token], [True])] + out.finish()
    assert [(span.token, span.text) for span in spans if span.text] == [(a, "a"), (b, "b"), (c, "c")]
    assert [span.token for span in spans] == ids
    assert joined <= 2 * len(ids)
