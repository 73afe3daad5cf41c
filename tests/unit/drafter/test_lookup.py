"""Trees without a model: the same answers as a grower gives, from a text instead of a forward."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tokens import random_grower

from drafter_service.growth_loop import with_model, without_model
from drafter_service.lookup_grower import LookupGrower
from rootward.core.frames import PROTOCOL, Commit, Grow, Hello, NeedSync, Open, extend_hash
from rootward.core.living_tree import LivingTree
from rootward.core.lookup import Prediction, parse_recipe
from rootward.core.requests import DraftMode, Sampling
from rootward.ports import ModelInfo

PERIOD = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2)


def hash_of(tokens) -> int:
    value = 0
    for token in tokens:
        value = extend_hash(value, token)
    return value


def opening(slot: int, prefix=PERIOD, **changes) -> Open:
    base = {
        "epoch": 1,
        "prefix": tuple(prefix),
        "sampling": Sampling(),
        "law": DraftMode.TOP_K,
        "seed": 5,
        "choice": 0,
        "num_atoms": 4,
        "node_cap": 8,
        "max_depth": 8,
        "topk": 3,
    }
    return Open(slot, **(base | changes))


def lookup(spec: str = "ngram:") -> LookupGrower:
    if spec == "random":
        return random_grower(4)
    recipe = parse_recipe(spec)
    return LookupGrower(
        ModelInfo(spec, 0, 4096),
        lambda message, shared: recipe.source(message.law, shared),
        incarnation=9,
    )


def grown(drafter: LookupGrower) -> list[tuple[tuple[int, int], Grow]]:
    frames = []
    for _ in range(100):
        if drafter.idle:
            return frames
        frames += drafter.level()
    raise AssertionError("growth does not come to rest")


def replica(prefix=PERIOD) -> LivingTree:
    return LivingTree(len(prefix), hash_of(prefix), vocab_size=50, node_cap=8)


def tokens(tree: LivingTree) -> list[int]:
    return tree.snapshot(8).tree.token[1:].tolist()


@pytest.mark.parametrize("law", [law for law in DraftMode if law is not DraftMode.IID])
def test_a_verifier_can_replay_what_is_streamed_and_every_node_is_chosen(law: DraftMode) -> None:
    drafter = lookup()
    assert drafter.open((0, 1), opening(1, law=law)) is None
    [(key, frame)] = grown(drafter)
    verifier = replica()
    assert verifier.receive(frame).kept == 8
    assert key == (0, 1)
    assert frame.at_rest
    assert not frame.sampled.any()
    assert not frame.rows
    assert tokens(verifier) == [3, 4, 1, 2, 3, 4, 1, 2]


def test_a_commit_keeps_the_subtree_and_growth_continues_below_it() -> None:
    drafter, verifier = lookup(), replica()
    drafter.open((0, 1), opening(1))
    for _, frame in grown(drafter):
        verifier.receive(frame)
    verifier.commit([3, 4])
    assert drafter.commit((0, 1), Commit(1, 10, (3, 4), verifier.hash)) == []
    [(_, frame)] = grown(drafter)
    assert (frame.base_len, frame.first_node, len(frame.token)) == (12, 9, 2)
    assert verifier.receive(frame).stale == 0
    assert tokens(verifier) == [1, 2, 3, 4, 1, 2, 3, 4]


def test_a_commit_off_the_tree_starts_anew() -> None:
    drafter, verifier = lookup(), replica()
    drafter.open((0, 1), opening(1))
    for _, frame in grown(drafter):
        verifier.receive(frame)
    verifier.commit([9])
    drafter.commit((0, 1), Commit(1, 10, (9,), verifier.hash))
    [(_, frame)] = grown(drafter)
    assert frame.at_rest
    assert len(frame.token) == 0  # nothing is known after 9; the verifier must not wait
    verifier.receive(frame)
    verifier.commit([1])
    drafter.commit((0, 1), Commit(1, 11, (1,), verifier.hash))
    [(_, frame)] = grown(drafter)
    verifier.receive(frame)
    assert tokens(verifier)[:3] == [2, 3, 4]


def test_commits_out_of_step_ask_for_the_prefix_and_repeats_are_ignored() -> None:
    drafter = lookup()
    drafter.open((0, 1), opening(1, (1, 2, 3)))
    good = Commit(1, 3, (4,), hash_of((1, 2, 3, 4)))
    assert drafter.commit((0, 1), good) == []
    assert drafter.commit((0, 1), good) == []
    lost = [NeedSync(1, 4, hash_of((1, 2, 3, 4)))]
    assert drafter.commit((0, 1), Commit(1, 9, (1,), 0)) == lost
    assert drafter.commit((0, 1), Commit(1, 4, (1,), 0)) == lost
    assert drafter.commit((0, 7), Commit(7, 4, (1,), 0)) == [NeedSync(7, 0, 0)]


@pytest.mark.parametrize("spec", ["ngram+recycling:", "random"])
@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    events=st.lists(
        st.one_of(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.sampled_from(["level", "deliver"]))
    ),
)
def test_both_replicas_agree_whatever_the_order_of_events(spec: str, text, events) -> None:
    """Commits overtake frames and are merged; frames come late, in order. In the end both hold the same tree."""
    drafter, verifier = lookup(spec), replica(text)
    drafter.open((0, 1), opening(1, text, topk=4))
    on_the_way: list[Grow] = []
    committed, base = [], len(text)

    def send() -> None:
        if committed:
            assert drafter.commit((0, 1), Commit(1, base, tuple(committed), verifier.hash)) == []

    def deliver() -> None:
        for frame in on_the_way:
            verifier.receive(frame)
        on_the_way.clear()

    for event in [*events, "level", "deliver"]:
        if event == "level":
            send()
            committed, base = [], verifier.length
            on_the_way += [frame for _, frame in drafter.level()]
        elif event == "deliver":
            deliver()
        else:
            verifier.commit(event)
            committed += event
    assert not verifier.broken
    assert drafter.trees[0, 1].tree.snapshot(8).tree == verifier.snapshot(8).tree
    assert drafter.idle


def test_what_cannot_be_taken_is_refused_with_the_reason() -> None:
    drafter = lookup()
    for bad in ({"prefix": ()}, {"topk": 0}, {"max_depth": 0}, {"node_cap": 0}, {"node_cap": 10**6}, {"num_atoms": 0}):
        assert "out of range" in drafter.open((0, 1), opening(1, **bad)).reason
    assert "at most 4096" in drafter.open((0, 1), opening(1, [1] * 4097)).reason
    assert drafter.open((0, 1), opening(1)) is None
    assert drafter.open((0, 1), opening(1)).reason.startswith("slot is open")
    drafter.close((0, 1))
    drafter.close((0, 1))
    assert not drafter.trees
    assert drafter.idle


def test_a_long_prompt_is_fed_in_pieces_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_service.lookup_grower.CHUNK", 4)
    drafter = lookup()
    drafter.open((0, 1), opening(1, PERIOD * 4))
    drafter.open((0, 2), opening(2, (1, 2, 1)))
    order = [key for _ in range(20) for key, _ in drafter.level()]
    assert order == [(0, 2), (0, 1)]
    assert drafter.idle


def test_a_level_is_bounded_and_serves_the_trees_that_waited_longest() -> None:
    drafter = lookup()
    for slot in range(20):
        drafter.open((0, slot), opening(slot))
    levels = [[slot for (_, slot), _ in drafter.level()] for _ in range(3)]
    assert list(itertools.chain(*levels)) == list(range(20))
    assert max(map(len, levels)) == 8


def test_sessions_of_one_verifier_share_a_memory_those_of_two_do_not() -> None:
    drafter = lookup("recycling:")
    drafter.open((0, 1), opening(1, (5, 6, 7)))
    grown(drafter)
    drafter.open((0, 2), opening(2, (5,)))
    drafter.open((1, 1), opening(1, (5,)))
    trees = {key: frame.token.tolist() for key, frame in grown(drafter)}
    assert trees == {(0, 2): [6, 7], (1, 1): []}


def test_tenants_and_cache_salts_have_memories_of_their_own() -> None:
    """Else the speed of a tenant's answers would tell what another one has written."""
    drafter = lookup("recycling:")
    drafter.open((0, 1), replace(opening(1, (5, 6, 7)), tenant=1, cache_salt=1))
    grown(drafter)
    for slot, (tenant, salt) in enumerate([(1, 1), (2, 1), (1, 2)], start=2):
        drafter.open((0, slot), replace(opening(slot, (5,)), tenant=tenant, cache_salt=salt))
    trees = {key: frame.token.tolist() for key, frame in grown(drafter)}
    assert trees == {(0, 2): [6, 7], (0, 3): [], (0, 4): []}


def test_memories_of_verifiers_that_are_gone_are_dropped() -> None:
    drafter = lookup("recycling:")
    for stream in range(40):
        drafter.open((stream, 1), opening(1))
    assert len(drafter._memories) == 16


def test_any_source_can_be_served_such_as_a_prediction() -> None:
    drafter = LookupGrower(
        ModelInfo("prediction", 0, 4096),
        lambda message, _: Prediction([7, 8, 9], prefix=len(message.prefix)),
        incarnation=9,
    )
    drafter.open((0, 1), opening(1))
    [(_, frame)] = grown(drafter)
    assert frame.token.tolist() == [7, 8, 9]


def test_a_drafter_without_a_model_loads_no_torch() -> None:
    code = (
        "from drafter_service.__main__ import build_lookup, recipe_of\n"
        "from drafter_service.settings import DrafterSettings\n"
        "build_lookup(recipe_of('ngram:'), DrafterSettings(model='ngram:'))\n"
        "import sys\n"
        "print(*[name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# -- who may work together --------------------------------------------------------------------------------------------


def hello(vocab: int = 50, tokenizer: str = "abc", protocol: int = PROTOCOL) -> Hello:
    return Hello("verifier", 1, tokenizer, vocab, 4096, protocol)


def test_a_drafter_without_a_model_takes_the_verifier_s_vocabulary() -> None:
    as_target, refusal = without_model(hello(), ModelInfo("ngram:", 0, 1 << 20))
    assert not refusal
    assert (as_target.vocab_size, as_target.max_positions, as_target.tokenizer_hash) == (50, 4096, "abc")


@pytest.mark.parametrize("agree", [with_model, without_model])
def test_another_protocol_is_refused(agree) -> None:
    assert "verifier speaks 9" in agree(hello(protocol=9), ModelInfo("m", 50, 10))[1]


def test_a_model_wants_its_own_tokenizer_or_at_least_its_vocabulary() -> None:
    own = ModelInfo("m", 60, 10, tokenizer_hash="abc")
    assert with_model(hello(), own) == (own, "")
    assert "check-pair" in with_model(hello(tokenizer="xyz"), own)[1]
    assert "target has 50, draft 60" in with_model(hello(tokenizer=""), own)[1]
