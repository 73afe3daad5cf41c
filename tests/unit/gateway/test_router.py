"""The routing rule, as a function of what a gateway knows of its verifiers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.routing import upstream

from gateway import router
from gateway.router import Outcome

NOW = 100.0
UPSTREAMS = st.lists(
    st.builds(
        upstream,
        name=st.sampled_from("abcdef"),
        ready=st.booleans(),
        num_running=st.integers(0, 9),
        max_sessions=st.integers(0, 8),
        num_in_flight=st.integers(0, 9),
    ),
    max_size=6,
    unique_by=lambda u: u.name,
)


def choose(upstreams, key, **options):
    return router.choose(upstreams, key, now=NOW, **options)


def idle(*names, **fields):
    return [upstream(name, max_sessions=8, **fields) for name in names]


@given(UPSTREAMS, st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")))
def test_only_ready_ones_and_avoided_ones_last(upstreams, warm, avoid):
    ready = {u.name for u in upstreams if u.ready}
    choice = choose(upstreams, "k", held={warm: 500}, avoid=avoid)
    assert (choice is None) == (not ready)
    if choice is not None:
        assert choice.upstream.name in ready
        assert (choice.upstream.name in avoid) == (ready <= avoid) == (choice.outcome is Outcome.FALLBACK)


@given(UPSTREAMS)
def test_without_hints_the_least_loaded(upstreams):
    choice = choose(upstreams, "k")
    if choice is not None:
        assert next(u.load for u in upstreams if u.name == choice.upstream.name) == min(
            u.load for u in upstreams if u.ready
        )


def test_equal_ones_share_and_keep_their_keys_when_another_comes():
    keys = [f"r{i}" for i in range(300)]
    before = {k: choose(idle("a", "b", "c"), k).upstream.name for k in keys}
    after = {k: choose(idle("a", "b", "c", "d"), k).upstream.name for k in keys}
    assert min(Counter(before.values()).values()) > 60
    assert all(after[k] in (before[k], "d") for k in keys)


def test_held_tokens_are_worth_up_to_a_quarter_of_the_slots():
    def chosen(running, tokens):
        busy = upstream("warm", num_running=running, max_sessions=8)
        choice = choose([busy, *idle("cold")], "k", held={"warm": tokens})
        return choice.upstream.name, choice.outcome

    assert chosen(1, 4096) == ("warm", Outcome.AFFINITY)
    assert chosen(1, 64) == ("cold", Outcome.LEAST_LOAD)
    assert chosen(2, 10**9) == ("cold", Outcome.LEAST_LOAD)


def test_the_longer_prefix_wins_among_equals():
    assert choose(idle("a", "b", "c"), "k", held={"a": 64, "b": 96}).upstream.name == "b"


def test_a_verifier_that_was_lost_recently_is_chosen_last():
    recent = upstream("a", max_sessions=8, lost_at=NOW - 5)
    busy = upstream("b", num_running=3, max_sessions=8)
    assert choose([recent, busy], "k").upstream.name == "b"
    assert choose([recent], "k").upstream.name == "a"


def test_requests_of_this_gateway_count_before_the_verifier_reports_them():
    assert upstream("a", num_running=1, num_waiting=1, max_sessions=4, num_in_flight=3).load == 0.75
