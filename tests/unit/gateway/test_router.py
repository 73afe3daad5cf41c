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
def test_only_ready_ones_and_avoided_ones_last(views, affinity, avoid):
    ready = {v.name for v in views if v.ready}
    choice = choose(views, "k", affinity=affinity, avoid=avoid)
    assert (choice is None) == (not ready)
    if choice is not None:
        assert choice.name in ready
        assert (choice.name in avoid) == (ready <= avoid) == (choice.outcome is Outcome.FALLBACK)


@given(VIEWS)
def test_without_affinity_the_least_loaded(views):
    choice = choose(views, "k")
    if choice is not None:
        assert next(v.load for v in views if v.name == choice.name) == min(v.load for v in views if v.ready)


def test_equal_ones_share_and_keep_their_keys_when_another_comes():
    keys = [f"r{i}" for i in range(300)]
    before = {k: choose(idle("a", "b", "c"), k).name for k in keys}
    after = {k: choose(idle("a", "b", "c", "d"), k).name for k in keys}
    assert min(Counter(before.values()).values()) > 60
    assert all(after[k] in (before[k], "d") for k in keys)


def test_affinity_is_worth_a_quarter_of_the_slots():
    busy = VerifierView("warm", True, num_running=2, max_sessions=8)
    assert choose([busy, *idle("cold")], "k", affinity="warm") == Choice("warm", Outcome.AFFINITY)
    busier = VerifierView("warm", True, num_running=3, max_sessions=8)
    assert choose([busier, *idle("cold")], "k", affinity="warm") == Choice("cold", Outcome.LEAST_LOAD)


def test_what_this_gateway_sent_counts_before_the_verifier_says_so():
    assert VerifierView("a", True, num_running=1, num_waiting=1, max_sessions=4, num_in_flight=3).load == 0.75
