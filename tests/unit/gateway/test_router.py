"""The routing rule, as a function of views."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.router import Choice, Outcome, VerifierView, choose

VIEWS = st.lists(
    st.builds(
        VerifierView,
        name=st.sampled_from("abcdef"),
        ready=st.booleans(),
        num_running=st.integers(0, 9),
        max_sessions=st.integers(0, 8),
        num_in_flight=st.integers(0, 9),
    ),
    max_size=6,
    unique_by=lambda v: v.name,
)


def idle(*names, **fields):
    return [VerifierView(name, True, max_sessions=8, **fields) for name in names]


@given(VIEWS, st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")))
def test_only_ready_ones_and_avoided_ones_last(views, warm, avoid):
    ready = {v.name for v in views if v.ready}
    choice = choose(views, "k", held={warm: 500}, avoid=avoid)
    assert (choice is None) == (not ready)
    if choice is not None:
        assert choice.name in ready
        assert (choice.name in avoid) == (ready <= avoid) == (choice.outcome is Outcome.FALLBACK)


@given(VIEWS)
def test_without_hints_the_least_loaded(views):
    choice = choose(views, "k")
    if choice is not None:
        assert next(v.load for v in views if v.name == choice.name) == min(v.load for v in views if v.ready)


def test_equal_ones_share_and_keep_their_keys_when_another_comes():
    keys = [f"r{i}" for i in range(300)]
    before = {k: choose(idle("a", "b", "c"), k).name for k in keys}
    after = {k: choose(idle("a", "b", "c", "d"), k).name for k in keys}
    assert min(Counter(before.values()).values()) > 60
    assert all(after[k] in (before[k], "d") for k in keys)


def test_held_tokens_are_worth_up_to_a_quarter_of_the_slots():
    def chosen(running, tokens):
        busy = VerifierView("warm", True, num_running=running, max_sessions=8)
        return choose([busy, *idle("cold")], "k", held={"warm": tokens})

    assert chosen(1, 4096) == Choice("warm", Outcome.AFFINITY)
    assert chosen(1, 64) == Choice("cold", Outcome.LEAST_LOAD)
    assert chosen(2, 10**9) == Choice("cold", Outcome.LEAST_LOAD)


def test_the_longer_prefix_wins_among_equals():
    assert choose(idle("a", "b", "c"), "k", held={"a": 64, "b": 96}).name == "b"


def test_a_verifier_that_was_lost_recently_is_chosen_last():
    recent = VerifierView("a", True, max_sessions=8, recently_lost=True)
    busy = VerifierView("b", True, num_running=3, max_sessions=8)
    assert choose([recent, busy], "k").name == "b"
    assert choose([recent], "k").name == "a"


def test_requests_of_this_gateway_count_before_the_verifier_reports_them():
    assert VerifierView("a", True, num_running=1, num_waiting=1, max_sessions=4, num_in_flight=3).load == 0.75
