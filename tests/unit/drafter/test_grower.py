"""The grower: one forward for all trees, cumulative commits, frames a verifier can replay."""

from __future__ import annotations

import numpy as np
import pytest

from rootward.core.frames import Commit, Grow, NeedSync, Open, extend_hash
from rootward.core.growth import BestFirst
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode, DraftStrategy, Sampling
from rootward.engine.grower import Grower
from rootward.engine.tabular import TabularModel


class Counting(TabularModel):
    """Counts its forwards."""

    forwards = 0
    widest = 0

    def forward(self, batch, **how):
        self.forwards += 1
        self.widest = max(self.widest, len(batch))
        return super().forward(batch, **how)


def hash_of(tokens) -> int:
    value = 0
    for token in tokens:
        value = extend_hash(value, token)
    return value


def opening(slot: int, prefix=(1, 2, 3), **changes) -> Open:
    base = {
        "epoch": 1,
        "prefix": tuple(prefix),
        "sampling": Sampling(),
        "law": DraftMode.SAMPLED,
        "seed": 5,
        "choice": 0,
        "num_atoms": 4,
        "node_cap": 8,
        "max_depth": 4,
        "topk": 3,
    }
    return Open(slot, **(base | changes))


def grower(**model) -> Grower[int]:
    network = Counting(5, seed=3, **({"max_slots": 4} | model))
    return Grower(network, incarnation=9, best_first=BestFirst(draws_per_level=2, root_family=(0.33, 0.27)))


def grown(drafter: Grower[int]) -> list[tuple[int, Grow]]:
    frames = []
    for _ in range(50):
        if drafter.idle:
            return frames
        frames += drafter.level()
    raise AssertionError("growth does not come to rest")


def replica(prefix=(1, 2, 3)) -> LivingTree:
    return LivingTree(len(prefix), hash_of(prefix), vocab_size=5, node_cap=8)


STRATEGIES = {  # strategy, mode: nodes by depth of its first tree of at most 8 nodes
    ("best_first", DraftMode.SAMPLED): None,
    ("best_first", DraftMode.GREEDY): None,
    ("best_first", DraftMode.TOP_K): None,
    ("best_first", DraftMode.COUPLED): None,
    ("greedy", DraftMode.GREEDY): None,
    ("greedy:2,2", DraftMode.GREEDY): [2, 4],
    ("chain:3", DraftMode.SAMPLED): [1, 1, 1],
    ("chain:3", DraftMode.TOP_K): [1, 1, 1],
    ("chain:3", DraftMode.COUPLED): [1, 1, 1],
    ("iid:2,3", DraftMode.IID): [2, 6],
    ("iid:2,2", DraftMode.TOP_K): [2, 4],
    ("rsd_c:3,1", DraftMode.SAMPLED): [3, 3],
    ("rsd_c:3,2,2", DraftMode.SAMPLED): [3, 5],  # cut in draw order
    ("rsd_s:2,3", DraftMode.SAMPLED): [2, 2, 2],
    ("rsd_s:2,3", DraftMode.TOP_K): None,
    ("top_k", DraftMode.TOP_K): None,
    ("top_k:2,1", DraftMode.TOP_K): [2, 2],
    ("coupled", DraftMode.COUPLED): None,
    ("coupled:2,1", DraftMode.COUPLED): [2, 2],
    ("marginals", DraftMode.TOP_K): None,
    ("marginals:2", DraftMode.TOP_K): None,
    ("marginals", DraftMode.COUPLED): None,
}


@pytest.mark.parametrize(("strategy", "law"), STRATEGIES, ids=str)
def test_a_verifier_can_replay_what_is_streamed_round_after_round(strategy: str, law: DraftMode) -> None:
    drafter, asked, text = grower(), DraftStrategy.parse(strategy), [1, 2, 3]
    assert drafter.open(1, opening(1, law=law, strategy=asked)) is None
    mine = drafter.trees[1].tree
    verifier = LivingTree(
        3,
        hash_of(text),
        vocab_size=5,
        node_cap=8,
        restarts=mine.restarts,
        copies=mine.copies,
        chain="chain" in strategy,
    )
    for round_ in range(4):
        for _, frame in grown(drafter):
            verifier.receive(frame)
        ours, theirs = mine.snapshot(8), verifier.snapshot(8)
        assert ours.tree == theirs.tree
        shape = STRATEGIES[strategy, law]
        assert len(verifier) == (8 if shape is None else sum(shape))
        assert shape is None or np.bincount(theirs.tree.depth).tolist() == [1, *shape]
        for a, b in zip(ours.rows, theirs.rows, strict=True):
            assert b is None or law.ratio
            if b is not None:
                np.testing.assert_array_equal(a[1], b[1])
        path = theirs.tree.path(len(verifier) if round_ % 2 else 1)
        run = (*path, round_)
        base, text = len(text), [*text, *run]
        assert drafter.commit(1, Commit(1, base, run, hash_of(text))) == []
        verifier.commit(run)
        assert drafter.trees[1].tree.snapshot(8).ids == verifier.snapshot(8).ids
    drafter.close(1)
    drafter.model.check_idle()


def test_what_was_drawn_for_a_tree_that_starts_anew_is_stale_after_the_commit() -> None:
    drafter = grower()
    drafter.open(1, opening(1, strategy=DraftStrategy.parse("rsd_c:2,2")))
    verifier = LivingTree(3, hash_of((1, 2, 3)), vocab_size=5, node_cap=8, restarts=True)
    frames = [frame for _, frame in grown(drafter)]
    first = int(frames[0].token[0])
    verifier.receive(frames[0])
    verifier.commit((first,))
    for frame in frames[1:]:
        assert verifier.receive(frame).kept == 0
    assert len(verifier) == 0
    drafter.commit(1, Commit(1, 3, (first,), hash_of((1, 2, 3, first))))
    for _, frame in grown(drafter):
        verifier.receive(frame)
    assert not verifier.broken
    assert len(verifier) == 6


def test_a_strategy_that_does_not_make_such_trees_is_refused() -> None:
    refused = grower().open(1, opening(1, law=DraftMode.GREEDY, strategy=DraftStrategy.parse("rsd_c:2")))
    assert refused is not None
    assert "rsd_c:2' grows sampled trees, not greedy ones" in refused.reason


@pytest.mark.parametrize(("tenant", "salt", "held"), [(7, 9, True), (8, 9, False), (7, 0, False)])
def test_a_text_that_is_known_is_not_read_again_unless_it_is_salted_otherwise(
    tenant: int, salt: int, held: bool
) -> None:
    drafter, text = grower(block_size=4), tuple(i % 5 for i in range(21))
    drafter.open(1, opening(1, text, tenant=7, cache_salt=9))
    first = [frame for _, frame in grown(drafter)]
    drafter.close(1)
    drafter.open(2, opening(1, (*text, 1, 2), tenant=tenant, cache_salt=salt))
    assert len(drafter.trees[2].pending) == (3 if held else 23)
    drafter.open(3, opening(1, text, tenant=tenant, cache_salt=salt, seed=6))
    again = [frame for key, frame in grown(drafter) if key == 3]
    drafter.close(2)
    drafter.close(3)
    whole = {node: row[0].tolist() for frame in first for node, row in frame.rows.items() if node == 0}
    assert {node: row[0].tolist() for frame in again for node, row in frame.rows.items() if node == 0} == whole
    drafter.model.check_idle()


def test_several_trees_share_every_forward() -> None:
    drafter = grower()
    for slot in (1, 2, 3):
        drafter.open(slot, opening(slot, (1, slot)))
    drafter.model.forwards = 0
    frames = grown(drafter)
    assert drafter.model.widest == 3
    assert drafter.model.forwards <= 5  # catch-up and four levels, not three times as many
    assert {key for key, _ in frames} == {1, 2, 3}


def test_the_last_frame_has_at_rest() -> None:
    drafter = grower()
    drafter.open(1, opening(1))
    frames = grown(drafter)
    assert [f.at_rest for _, f in frames] == [False] * (len(frames) - 1) + [True]


def test_a_commit_keeps_the_subtree_and_growth_continues_below_it() -> None:
    drafter = grower()
    drafter.open(1, opening(1))
    verifier = replica()
    for _, frame in grown(drafter):
        verifier.receive(frame)
    token = verifier.snapshot(8).tree.token[1]
    kept = verifier.commit([int(token)])
    assert kept != [None]
    before = len(verifier)
    assert drafter.commit(1, Commit(1, 3, (int(token),), verifier.hash)) == []
    for _, frame in grown(drafter):
        assert verifier.receive(frame).stale == 0
    assert len(verifier) == 8 > before
    assert verifier.snapshot(8).tree == drafter.trees[1].tree.snapshot(8).tree


def test_unsent_growth_leaves_under_the_old_base_before_a_commit() -> None:
    drafter = grower()
    drafter.open(1, opening(1))
    drafter.level()
    growing = drafter.trees[1]
    growing.growth.draw(drafter._words(growing))
    (unsent,) = drafter.commit(1, Commit(1, 3, (0,), hash_of((1, 2, 3, 0))))
    assert isinstance(unsent, Grow)
    assert unsent.base_len == 3


def test_commits_out_of_step_ask_for_the_prefix_and_repeats_are_ignored() -> None:
    drafter = grower()
    drafter.open(1, opening(1))
    good = Commit(1, 3, (4,), hash_of((1, 2, 3, 4)))
    drafter.commit(1, good)
    assert drafter.commit(1, good) == []
    lost = [NeedSync(1, 4, hash_of((1, 2, 3, 4)))]
    assert drafter.commit(1, Commit(1, 9, (1,), 0)) == lost
    assert drafter.commit(1, Commit(1, 4, (1,), 0)) == lost
    assert drafter.commit(1, Commit(1, 4, (99,), 0)) == lost
    assert drafter.commit(7, Commit(7, 4, (1,), 0)) == [
        NeedSync(7, 0, 0)
    ]  # nobody should wait for a slot that is not there


def test_what_cannot_be_taken_is_refused_with_the_reason() -> None:
    drafter = grower(max_slots=1, max_positions=16)
    assert "context of 16" in drafter.open(1, opening(1, [1] * 16)).reason
    assert "vocabulary of 5" in drafter.open(1, opening(1, (1, 7))).reason
    for bad in ({"prefix": ()}, {"topk": 0}, {"max_depth": 0}, {"node_cap": 0}, {"node_cap": 10**6}, {"num_atoms": 0}):
        assert "out of range" in drafter.open(1, opening(1, **({"prefix": (1,)} | bad))).reason
    assert drafter.open(1, opening(1)) is None
    assert drafter.open(1, opening(1)).reason.startswith("slot is open")
    assert drafter.open(2, opening(2)).retry_after_ms > 0
    drafter.close(1)
    assert drafter.open(2, opening(2)) is None


def test_draws_never_repeat_also_after_reopening_a_request() -> None:
    """The same request opened twice in one process grows two different trees: a draw number is used once."""
    shapes = set()
    drafter = grower()
    for slot in range(1, 6):
        drafter.open(slot, opening(slot))
        grown(drafter)
        shapes.add(tuple(drafter.trees[slot].tree.snapshot(8).tree.token.tolist()))
        drafter.close(slot)
    assert len(shapes) > 1


def test_growth_ends_at_the_draft_context() -> None:
    drafter = grower(max_positions=8)
    drafter.open(1, opening(1, [1] * 6))
    frames = grown(drafter)
    assert frames[-1][1].at_rest
    deepest = max(n.depth for n in drafter.trees[1].tree.nodes.values())
    assert deepest < 8
    drafter.commit(1, Commit(1, 6, (0, 1, 2), hash_of([1] * 6 + [0, 1, 2])))
    assert grown(drafter)[-1][1].at_rest


def test_kv_cells_are_given_back() -> None:
    drafter = grower()
    drafter.open(1, opening(1))
    grown(drafter)
    drafter.close(1)
    drafter.model.check_idle()
    assert drafter.model.num_free_slots == 4


@pytest.mark.parametrize(
    "wish", [Sampling(logit_bias=((7, 1.0),)), Sampling(allowed_token_ids=(1, 7))], ids=["bias", "allowed"]
)
def test_tokens_that_the_draft_model_does_not_have_cost_their_own_slot_only(wish: Sampling) -> None:
    """Vocabularies of one tokenizer may be padded to different sizes."""
    drafter = grower()
    assert drafter.open(1, opening(1)) is None
    refused = drafter.open(2, opening(2, sampling=wish))
    assert refused is not None
    assert "token 7" in refused.reason
    assert refused.retry_after_ms == 0
    assert {key for key, _ in grown(drafter)} == {1}


def test_a_prediction_is_not_followed_beyond_the_cap_of_a_tree_whose_first_round_has_none() -> None:
    """Such a message comes of an Open that waited until a round without a tree was committed."""
    grower = Grower(TabularModel(5, seed=3), incarnation=1)
    expected = (1, 2, 3, 4, 1, 2, 3, 4)
    message = opening(1, (1, *expected[:4]), node_cap=2, node_budget=0, prediction=expected, num_prompt=1)
    assert grower.open("a", message) is None
    assert len(grower.trees["a"].tree) <= 2
