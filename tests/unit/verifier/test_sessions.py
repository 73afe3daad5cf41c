"""Committing runs: stops, lengths, accounts. A stop beats length inside a run, wherever the run is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootward.core.frames import extend_hash
from rootward.core.requests import (
    DraftMode,
    DraftStrategy,
    FinishReason,
    Rule,
    Sampling,
    Speculation,
    Stopping,
    TokenLogprob,
    VerifierRequest,
)
from rootward.core.tree import root_only
from rootward.errors import InvalidRequest
from verifier_service.session import TRANSITIONS, Event, Session, State, choose_rule

EOS = 9


def session(*, committed: tuple[int, ...] = (), **stopping) -> Session:
    wanted = VerifierRequest("r", (1, 2), committed=committed, stopping=Stopping(**stopping))
    return Session(1, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset({EOS}))


def reference(text: list[int], max_tokens: int, stops: tuple[int, ...], ignore_eos: bool) -> tuple[list[int], str]:
    """One token at a time, as plain decoding would end."""
    for i, token in enumerate(text[:max_tokens]):
        if token in stops or (token == EOS and not ignore_eos):
            return text[: i + 1], "stop"
    return text[:max_tokens], "length"


@given(
    text=st.lists(st.integers(0, 10), min_size=30, max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    max_tokens=st.integers(1, 25),
    stops=st.sets(st.integers(0, 8), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
def test_runs_of_any_size_end_where_single_tokens_would(text, cuts, max_tokens, stops, ignore_eos) -> None:
    one = session(max_tokens=max_tokens, stop_token_ids=stops, ignore_eos=ignore_eos)
    emitted, at = [], 0
    for size in cuts:
        run = one.advance(tuple(text[at : at + size]), num_nodes=4, missed=False)
        assert run.offset == len(emitted)
        emitted += run.tokens
        at += size
        if run.finish is not None:
            break
    wanted, why = reference(text, max_tokens, stops, ignore_eos)
    assert emitted == wanted
    assert run.finish is not None
    assert run.finish.reason.value == why
    stats = run.finish.stats
    rounds = stats.num_spec_steps + stats.num_plain_steps
    assert stats.num_accepted_draft_tokens + rounds >= len(emitted)  # the last round may have lost its bonus token
    assert stats.num_accepted_draft_tokens + rounds - len(emitted) <= 1
    assert one.tokens == [1, 2, *emitted]


def test_the_hash_follows_the_text() -> None:
    one = session(max_tokens=10)
    one.advance((3, 4), 2, missed=False)
    value = 0
    for token in (1, 2, 3, 4):
        value = extend_hash(value, token)
    assert one.hash == value


def test_a_resumed_session_counts_from_where_the_lost_one_was() -> None:
    one = session(committed=(5, 6), max_tokens=5)
    assert one.prefill_left == 3
    run = one.advance((7, 8, 3, 3), 3, missed=False)
    assert (run.offset, run.tokens) == (2, (7, 8, 3))
    assert run.finish is not None
    assert run.finish.reason is FinishReason.LENGTH


def test_processors_see_the_text_so_far() -> None:
    one = session(committed=(5, 6), max_tokens=9, min_tokens=4, stop_token_ids=(7,))
    assert one.prefix.history is None
    assert (one.prefix.num_before_stop, set(one.prefix.stop_ids)) == (2, {7, EOS})
    one.advance((3, 3), 1, missed=False)
    assert one.prefix.num_before_stop == 0
    wanted = VerifierRequest("r", (1, 2), Sampling(presence_penalty=1.0), Stopping(9), committed=(5, 6))
    two = Session(1, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset({EOS}))
    two.advance((3, 3), 1, missed=False)
    ids, counts, _ = two.prefix.history.below(root_only())
    assert dict(zip(ids.tolist(), counts[0].tolist(), strict=True)) == {1: 0, 2: 0, 5: 1, 6: 1, 3: 2}
    wanted = VerifierRequest("r", (1, 2), Sampling(bad_sequences=((4,), (3, 3, 3, 3))), Stopping(9), committed=(6,))
    three = Session(1, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset({EOS}))
    assert list(three.prefix.output) == [6]  # the prompt is no output
    three.advance((3, 3, 3), 1, missed=False)
    assert list(three.prefix.output) == [3, 3, 3]


def test_no_tenant_has_the_cached_prefixes_of_another_by_its_name() -> None:
    def salt(**fields) -> str:
        wanted = VerifierRequest("r", (1, 2), **fields)
        return Session(1, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset({EOS})).salt

    salts = [
        salt(tenant="a"),
        salt(tenant="a", cache_salt="s"),
        salt(tenant="a", prompt_logprobs=1),
        salt(tenant=repr(("a", ""))),
        salt(tenant=repr(("a", "", ""))),
        salt(tenant=repr(("a", "s", ""))),
        salt(tenant=repr(("a", "", "1"))),
        salt(),
    ]
    assert len(set(salts)) == len(salts)
    assert salt(tenant="a", cache_salt="s") == salts[1]


def test_statistics_name_the_source_of_the_last_verified_tree() -> None:
    one = session(max_tokens=4)
    one.advance((3,), 0, missed=False)
    assert one.counts.drafter == ""
    one.advance((3,), 2, missed=False, drafter="ngram")
    one.advance((3,), 2, missed=False, drafter="d")
    run = one.advance((3,), 0, missed=True)
    assert run.finish is not None
    stats = run.finish.stats
    assert (stats.drafter, stats.verification, stats.num_spec_steps, stats.num_drafter_misses) == (
        "d",
        "traversal",
        2,
        1,
    )


def test_logprobs_are_cut_with_the_run() -> None:
    one = session(max_tokens=10)
    told = tuple(TokenLogprob(-float(i)) for i in range(4))
    run = one.advance((3, EOS, 4, 5), 3, missed=False, logprobs=told)
    assert (run.tokens, run.logprobs) == ((3, EOS), told[:2])


class Full:
    """A matcher beyond its limits."""

    def advance(self, tokens) -> bool:
        return False


def test_a_form_that_cannot_be_followed_aborts() -> None:
    one = session(max_tokens=10)
    one.matcher = Full()
    run = one.advance((EOS,), 0, missed=False)
    assert run.finish is not None
    assert run.finish.reason is FinishReason.ABORTED


@pytest.mark.parametrize(
    ("sampling", "stopping", "word"),
    [
        (Sampling(logit_bias=((10, 1.0),)), Stopping(9), "logit_bias: 10"),
        (Sampling(allowed_token_ids=(3, 12)), Stopping(9), "allowed_token_ids: 12"),
        (Sampling(allowed_token_ids=(EOS,)), Stopping(9, min_tokens=1), "min_tokens: 1 leaves no token"),
        (Sampling(allowed_token_ids=(3,)), Stopping(9, (3,), True, 1), "min_tokens: 1 leaves no token"),
        (Sampling(), Stopping(9, tuple(range(10)), min_tokens=1), "min_tokens: 1 leaves no token"),
        (Sampling(), Stopping(9, (10,)), "stop_token_ids: 10"),
        (Sampling(), Stopping(9, (3,) * 1025), "stop_token_ids: 1025 ids are more than 1024"),
        (Sampling(bad_sequences=((3, 10),)), Stopping(9), "bad_words: 10"),
        (Sampling(bad_sequences=tuple((t,) for t in range(9))), Stopping(9, min_tokens=1), "bad_words: 9 leave"),
    ],
)
def test_tokens_must_exist_and_one_must_be_left(sampling: Sampling, stopping: Stopping, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        VerifierRequest("r", (1, 2), sampling, stopping).check_tokens(10, (EOS,))
    VerifierRequest("r", (1, 2), Sampling(allowed_token_ids=(EOS,)), Stopping(9, (), True, 1)).check_tokens(10, (EOS,))


def rule_of(temperature: float = 1.0, default: DraftMode = DraftMode.SAMPLED, **wish) -> tuple[Rule, DraftMode]:
    wanted = VerifierRequest("r", (1,), sampling=Sampling(temperature), speculation=Speculation(**wish))
    return choose_rule(wanted, default)[:2]


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (rule_of(), (Rule.TRAVERSAL, DraftMode.SAMPLED)),
        (rule_of(default=DraftMode.GREEDY), (Rule.TRAVERSAL, DraftMode.GREEDY)),
        (rule_of(0.0), (Rule.MATCH, DraftMode.TOP_K)),
        (rule_of(0.0, law=DraftMode.SAMPLED), (Rule.MATCH, DraftMode.TOP_K)),
        (rule_of(rule=Rule.TOKEN), (Rule.TOKEN, DraftMode.SAMPLED)),
        (rule_of(rule=Rule.MATCH), (Rule.MATCH, DraftMode.COUPLED)),
        (rule_of(law=DraftMode.TOP_K), (Rule.MATCH, DraftMode.TOP_K)),
        (rule_of(default=DraftMode.COUPLED), (Rule.MATCH, DraftMode.COUPLED)),
        (rule_of(default=DraftMode.COUPLED, rule=Rule.TRAVERSAL), (Rule.TRAVERSAL, DraftMode.SAMPLED)),
    ],
)
def test_every_wish_becomes_a_valid_pair(got, wanted) -> None:
    assert got == wanted


@pytest.mark.parametrize(
    ("wish", "default", "wanted"),
    [
        ({}, "rsd_c:2,2", (Rule.TRAVERSAL, DraftMode.SAMPLED, "rsd_c:2,2")),
        ({}, "iid:2,2", (Rule.MULTI_STEP, DraftMode.IID, "iid:2,2")),
        ({"rule": Rule.TOKEN}, "iid:2,2", (Rule.TOKEN, DraftMode.IID, "iid:2,2")),
        ({"law": DraftMode.COUPLED}, "rsd_c:2", (Rule.MATCH, DraftMode.COUPLED, "rsd_c:2")),
        ({"law": DraftMode.GREEDY}, "rsd_c:2", (Rule.TRAVERSAL, DraftMode.GREEDY, "best_first")),
        ({"rule": Rule.BLOCK}, "best_first", (Rule.BLOCK, DraftMode.SAMPLED, "chain:4")),
        # A request may ask for any depth up to 1024; chains end at 64.
        ({"rule": Rule.BLOCK, "max_depth": 1024}, "best_first", (Rule.BLOCK, DraftMode.SAMPLED, "chain:64")),
        ({"rule": Rule.MULTI_STEP}, "rsd_s:2,2", (Rule.MULTI_STEP, DraftMode.IID, "iid:2,2,2")),
        ({"strategy": "marginals"}, "best_first", (Rule.MATCH, DraftMode.TOP_K, "marginals")),
        ({"strategy": "chain:3"}, "best_first", (Rule.TRAVERSAL, DraftMode.SAMPLED, "chain:3")),
    ],
)
def test_a_request_or_else_its_drafters_choose_the_strategy(wish: dict, default: str, wanted: tuple) -> None:
    if "strategy" in wish:
        wish = wish | {"strategy": DraftStrategy.parse(wish["strategy"])}
    request = VerifierRequest("r", (1,), speculation=Speculation(**wish))
    rule, law, strategy = choose_rule(request, DraftMode.GREEDY, DraftStrategy.parse(default))
    assert (rule, law, str(strategy)) == wanted
    still = replace(request, sampling=Sampling(0.0))
    assert choose_rule(still, DraftMode.GREEDY, DraftStrategy.parse(default))[0] is Rule.MATCH


@pytest.mark.parametrize(
    ("strategy", "rule", "fix"),
    [
        ("rsd_c:2,2", Rule.BLOCK, "chain:K"),
        ("chain:3", Rule.MULTI_STEP, "iid:B1"),
        ("coupled", Rule.TRAVERSAL, "only match"),
    ],
)
def test_a_rule_that_the_strategy_asked_for_does_not_allow_is_refused(strategy: str, rule: Rule, fix: str) -> None:
    wish = Speculation(rule=rule, strategy=DraftStrategy.parse(strategy))
    with pytest.raises(InvalidRequest, match=rf"speculation.verification: '{rule.value}'.*{fix}"):
        choose_rule(VerifierRequest("r", (1,), speculation=wish), DraftMode.GREEDY)


def test_ratio_tests_on_chosen_trees_cannot_even_be_asked_for() -> None:
    with pytest.raises(ValueError, match="match"):
        Speculation(rule=Rule.TRAVERSAL, law=DraftMode.TOP_K)


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.TOKEN], ids=lambda v: v.value)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_that_would_not_be_lossless_is_refused_and_never_replaced(rule: Rule, temperature: float) -> None:
    wish = Speculation(law=DraftMode.COUPLED)
    object.__setattr__(wish, "rule", rule)  # however it got past its own check
    wanted = VerifierRequest("r", (1,), sampling=Sampling(temperature), speculation=wish)
    with pytest.raises(
        InvalidRequest, match=f"speculation.verification: '{rule.value}' .* is not lossless for coupled"
    ):
        choose_rule(wanted, DraftMode.SAMPLED)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_events_that_are_not_in_the_table_raise_and_change_nothing(state: State, event: Event) -> None:
    one = session()
    one.state = state
    if (state, event) in TRANSITIONS:
        one.on(event)
        assert one.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(RuntimeError, match="illegal in state"):
            one.on(event)
        assert one.state is state


def test_nothing_follows_the_end_of_a_session() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is State.FINISHED]
    assert all((state, Event.FINISH) in TRANSITIONS for state in State if state is not State.FINISHED)
