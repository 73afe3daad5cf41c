"""Growth ahead: predicted bonus tokens, the budget a verifier allows, the path a client expects."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.fake_clock import FakeClock
from unit.drafter.test_grower import Counting, grown, hash_of, opening

from rootward.core.frames import Commit, Launch
from rootward.core.growth import AheadBudget, BestFirst
from rootward.core.growth import growth as growth_module
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import DraftMode
from rootward.core.rng import Key, bonus_gumbel, target_gumbel
from rootward.engine.grower import Grower

PREFIX = (1, 2, 3)
KEY = Key(77)
BUDGET = AheadBudget(share=4, draws_per_level=2)


def grower(vocab: int = 5) -> Grower[int]:
    network = Counting(vocab, seed=3, max_slots=4)
    return idle(Grower(network, incarnation=9, best_first=BestFirst(draws_per_level=2), ahead_budget=BUDGET))


def idle(drafter: Grower[int]) -> Grower[int]:
    """A drafter that has measured long pauses between a round's growth and the next commit."""
    drafter.idle_time.idle_s = 1e9
    return drafter


def ahead(**changes):
    return opening(1, **({"node_cap": 4, "ahead_cap": 24} | changes))


def launch(drafter: Grower[int], slot: int = 1) -> None:
    """The round at the present root runs."""
    length = drafter.trees[slot].tree.length
    drafter.launch(slot, Launch(slot, length, KEY.bonus(length)))


def running(drafter: Grower[int], **changes) -> None:
    """A tree whose first round runs already."""
    assert drafter.open(1, ahead(**changes)) is None
    launch(drafter)


def replica(node_cap: int = 4) -> LivingTree:
    return LivingTree(3, hash_of(PREFIX), vocab_size=5, node_cap=node_cap, ahead_cap=24)


def guesses(tree: LivingTree) -> dict[int, list[int]]:
    """By the length of the text they follow: their tokens."""
    found: dict[int, list[int]] = {}
    for record in tree.nodes.values():
        if record.guess:
            found.setdefault(record.depth - 1, []).append(record.token)
    return found


def test_guesses_follow_once_the_tree_rests_and_a_verifier_can_replay_them() -> None:
    drafter, verifier = grower(), replica()
    running(drafter)
    rested = False
    for _, frame in grown(drafter):
        assert not frame.guesses.any() or rested or frame.at_rest
        rested |= frame.at_rest
        verifier.receive(frame)
    mine = drafter.trees[1].tree
    assert list(verifier.nodes) == list(mine.nodes)
    assert len(verifier) == 4
    assert 6 < verifier.num_ahead <= 24
    assert all(mine.nodes[i].head == ROOT for i in verifier.snapshot(99).ids[1:])
    drafter.model.check_idle()


def test_no_bonus_token_is_predicted_before_the_round_runs() -> None:
    """Its noise is told then, and a launch of another round tells nothing about this one."""
    drafter = grower()
    drafter.open(1, ahead())
    drafter.launch(1, Launch(1, 2, KEY.bonus(2)))
    drafter.launch(2, Launch(2, 3, KEY.bonus(3)))  # of no tree
    nodes = [len(frame.token) for _, frame in grown(drafter)]
    tree = drafter.trees[1].tree
    assert (sum(nodes), tree.num_ahead, drafter.idle) == (4, 0, True)
    launch(drafter)
    grown(drafter)
    assert tree.num_ahead > 6
    drafter.commit(1, Commit(1, 3, (4,), hash_of((*PREFIX, 4))))
    grown(drafter)
    assert tree.num_ahead == 0


def test_a_guess_is_what_the_noise_makes_of_the_row() -> None:
    drafter = grower()
    running(drafter)
    grown(drafter)
    tree = drafter.trees[1].tree
    row = drafter.trees[1].growth.own.rows[tree.root_id]
    drawn = {n.token for n in tree.nodes.values() if n.parent == ROOT and not n.guess}
    order = row.ids[np.argsort(-(np.log(row.law) + bonus_gumbel(KEY.bonus(3), 1, 3, row.ids)))]
    at_root = guesses(tree)[3]
    assert at_root == [t for t in order.tolist() if t not in drawn][: len(at_root)]


def test_a_commit_to_a_guess_keeps_its_tree_and_drops_the_other_bets() -> None:
    drafter, verifier = grower(), replica()
    running(drafter)
    for _, frame in grown(drafter):
        verifier.receive(frame)
    guess = next(i for i, n in verifier.nodes.items() if n.guess and n.parent == ROOT)
    below = [i for i, n in verifier.nodes.items() if n.head == guess and i != guess]
    token = verifier.nodes[guess].token
    assert verifier.commit([token]) == [guess]
    assert list(verifier.nodes) == below
    assert len(verifier) == len(below) == 3
    forwards = drafter.model.forwards
    drafter.commit(1, Commit(1, 3, (token,), verifier.hash))
    assert list(drafter.trees[1].tree.nodes) == below
    for _, frame in grown(drafter):
        assert verifier.receive(frame).stale == 0
    assert drafter.model.forwards > forwards
    assert verifier.snapshot(99).tree == drafter.trees[1].tree.snapshot(99).tree
    assert len(verifier) == 4
    drafter.close(1)
    drafter.model.check_idle()


def test_at_every_node_of_a_tree_that_hung_below_a_guess_the_noise_chooses() -> None:
    """Rows that were known before the guess turned out right are asked for guesses after it."""
    drafter = grower(vocab=40)
    running(drafter, ahead_cap=48, num_atoms=40)
    grown(drafter)
    tree = drafter.trees[1].tree
    guess = next(n for n in tree.nodes.values() if n.guess and n.parent == ROOT)
    drafter.commit(1, Commit(1, 3, (guess.token,), hash_of((*PREFIX, guess.token))))
    known_before = drafter.trees[1].growth.expanded
    launch(drafter)
    grown(drafter)
    asked = 0
    for node, row in drafter.trees[1].growth.own.rows.items():
        record = tree.at(node)
        children = [tree.nodes[c] for c in record.children]
        drawn, chosen = ([c.token for c in children if c.guess is kind] for kind in (False, True))
        order = row.ids[np.argsort(-(np.log(row.law) + bonus_gumbel(KEY.bonus(4), 1, record.depth, row.ids)))]
        assert chosen == [t for t in order.tolist() if t not in drawn][: len(chosen)]
        asked += len(chosen) > 0 and node in known_before and node != tree.root_id
    assert asked


def test_a_guess_grows_no_larger_a_tree_than_it_may_be_the_root_of() -> None:
    """Its nodes count as the root's when a commit has walked over it before they arrive."""
    drafter, verifier = grower(), replica(node_cap=2)
    running(drafter, node_cap=2)
    frames = [frame for _, frame in grown(drafter)]
    while not verifier.num_ahead:
        verifier.receive(frames.pop(0))
    guess = next(n for n in verifier.nodes.values() if n.guess and n.parent == ROOT)
    verifier.commit([guess.token])
    for frame in frames:
        verifier.receive(frame)
    assert 0 < len(verifier) <= 2


def test_rounds_that_were_merged_walk_over_one_guess_each() -> None:
    """A bet on the second round died with the first one, whoever hears of both at once."""
    drafter, verifier = grower(), replica()
    running(drafter)
    for _, frame in grown(drafter):
        verifier.receive(frame)
    drawn = verifier.snapshot(99)
    first = int(drawn.tree.token[1])
    bet = next(n for n in verifier.nodes.values() if n.guess and n.parent == drawn.ids[1])
    for token in (first, bet.token):  # two plain rounds: the first one's bonus token was drawn and not verified
        verifier.commit([token])
    drafter.commit(1, Commit(1, 3, (first, bet.token), verifier.hash, runs=(1, 1)))
    assert list(drafter.trees[1].tree.nodes) == list(verifier.nodes) == []
    for _, frame in grown(drafter):
        assert verifier.receive(frame).stale == 0
    assert len(verifier) == 4


def test_kv_is_held_for_living_nodes_only() -> None:
    """Drawn nodes that become the root again and again: predictions below them do not pile up."""
    drafter = grower()
    running(drafter)
    growing = drafter.trees[1]
    text = list(PREFIX)
    for _ in range(12):
        grown(drafter)
        tree = growing.tree
        token = int(tree.snapshot(1).tree.token[1])
        base, text = len(text), [*text, token]
        drafter.commit(1, Commit(1, base, (token,), hash_of(text)))
        launch(drafter)
        held = drafter.model.tree(growing.kv_slot).num_uncommitted
        assert held <= len(growing.growth.expanded)
    drafter.model.check_idle()


def test_no_budget_no_work() -> None:
    drafter = grower()
    drafter.open(1, ahead())
    grown(drafter)
    drafter.commit(1, Commit(1, 3, (0,), hash_of((*PREFIX, 0)), node_budget=0))
    before = drafter.model.forwards
    (rest,) = grown(drafter)
    assert rest[1].at_rest
    assert drafter.model.forwards == before
    drafter.commit(1, Commit(1, 4, (1, 2), hash_of((*PREFIX, 0, 1, 2)), node_budget=2))
    grown(drafter)
    assert len(drafter.trees[1].tree) == 2
    assert drafter.model.forwards > before


def test_the_first_tree_is_no_larger_than_its_verifier_said() -> None:
    drafter = grower()
    drafter.open(1, ahead(node_budget=2, ahead_cap=0))
    grown(drafter)
    assert len(drafter.trees[1].tree) == 2
    drafter.commit(1, Commit(1, 3, (4,), hash_of((*PREFIX, 4)), node_budget=4))
    grown(drafter)
    assert len(drafter.trees[1].tree) == 4


@pytest.mark.parametrize("law", [law for law in DraftMode if law is not DraftMode.IID])
def test_the_path_a_client_expects_is_in_the_tree(law: DraftMode) -> None:
    drafter, verifier = grower(), replica(node_cap=8)
    wish = {"prediction": (4, 4, 0, 4, 4, 1), "num_prompt": 3, "law": law, "ahead_cap": 0, "node_cap": 8}
    drafter.open(1, ahead(**wish))
    for _, frame in grown(drafter):
        verifier.receive(frame)
    first = verifier.snapshot(8).tree
    assert first.token[1] == 4  # before anything else
    assert not first.sampled[1]
    assert len(verifier) == 8
    path = (4, 4, 0, 4)  # more has agreed: more is believed
    hash_after = hash_of((*PREFIX, *path))
    verifier.commit(path)
    drafter.commit(1, Commit(1, 3, path, hash_after))
    for _, frame in grown(drafter):
        verifier.receive(frame)
    tree = verifier.snapshot(8).tree
    assert (4, 1) in {tree.path(i) for i in range(len(tree))}


def test_guesses_follow_the_path_a_client_expects() -> None:
    """The nodes of the path above a guess are read before it, though the round needs no row of theirs."""
    drafter, verifier = grower(), replica()
    running(drafter, prediction=(4, 0, 1, 2, 3), num_prompt=3)
    for _, frame in grown(drafter):
        verifier.receive(frame)
    assert verifier.snapshot(4).tree.path(4) == (4, 0, 1, 2)
    assert len(PREFIX) + 4 in guesses(verifier)  # behind the path
    assert list(verifier.nodes) == list(drafter.trees[1].tree.nodes)
    drafter.model.check_idle()


def test_under_matching_growing_ahead_is_growing_on() -> None:
    drafter = grower()
    drafter.open(1, ahead(law=DraftMode.COUPLED))
    grown(drafter)
    assert len(drafter.trees[1].tree) == 28
    assert drafter.trees[1].tree.num_ahead == 0


def test_a_guess_with_nothing_below_it_is_refused() -> None:
    """Were it right, the root that it became would have no growth."""
    with pytest.raises(ValueError, match="share"):
        AheadBudget(nodes=4, share=1)


def test_what_is_launched_with_the_nodes_that_were_kept_leaves_its_drafter_to_the_bets() -> None:
    drafter, verifier = grower(), replica()
    running(drafter)
    for _, frame in grown(drafter):
        verifier.receive(frame)
    guess = next(n for n in verifier.nodes.values() if n.guess and n.parent == ROOT)
    verifier.commit([guess.token])
    kept = len(verifier)
    drafter.commit(1, Commit(1, 3, (guess.token,), verifier.hash, node_budget=kept))
    launch(drafter)
    for _, frame in grown(drafter):
        assert verifier.receive(frame).stale == 0
    assert len(verifier) == kept < 4
    assert verifier.num_ahead > 6
    parents = {n.parent for n in verifier.nodes.values() if n.guess}
    assert parents <= {ROOT, *verifier.snapshot(99).ids}


def test_under_matching_what_no_round_waits_for_is_drawn_in_larger_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_module, "DRAWS_BEYOND", 6)
    network = Counting(5, seed=3, max_slots=1)
    drafter: Grower[int] = idle(Grower(network, incarnation=9, best_first=BestFirst(draws_per_level=2)))
    drafter.open(1, ahead(law=DraftMode.COUPLED, topk=5, max_depth=9))
    sizes = [len(frame.token) for _, frame in grown(drafter)]
    assert sizes[:2] == [2, 2]
    assert max(sizes[2:]) == 6
    assert sum(sizes) == 28


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.COUPLED])
@pytest.mark.parametrize(("pause_s", "grows"), [(0.0, False), (1.9, False), (2.1, True), (60.0, True)])
def test_growth_continues_after_a_round_if_pauses_are_longer_than_two_levels(
    law: DraftMode, pause_s: float, grows: bool
) -> None:
    clock = FakeClock()
    drafter: Grower[int] = Grower(Counting(5, seed=3, max_slots=1), incarnation=9, ahead_budget=BUDGET, clock=clock)
    drafter.idle_time.record_level = lambda seconds: setattr(drafter.idle_time, "level_s", 1.0)  # type: ignore[method-assign]
    drafter.open(1, ahead(law=law))
    text = list(PREFIX)
    for round_ in range(3):
        launch(drafter)
        nodes = sum(len(frame.token) for _, frame in grown(drafter))
        assert (nodes + len(drafter.trees[1].tree.nodes) > 2 * 4 + 4) is (grows and round_ > 0), round_
        asyncio.run(clock.advance(pause_s))
        base, text = len(text), [*text, 4]
        drafter.commit(1, Commit(1, base, (4,), hash_of(text)))


def test_under_matching_the_target_may_take_an_atom_that_no_declared_row_would_hold() -> None:
    """The row does not travel, so the noise speaks before it is cut."""
    drafter: Grower[int] = Grower(Counting(5, seed=3, max_slots=1), incarnation=9)
    drafter.open(1, ahead(law=DraftMode.COUPLED, num_atoms=1, node_cap=1, ahead_cap=0))
    grown(drafter)
    growing = drafter.trees[1]
    law = drafter.model.law(PREFIX)
    best = int(np.argmax(np.log(law) + target_gumbel(growing.key, 3, np.arange(5))))
    assert [n.token for n in growing.tree.nodes.values()] == [best]


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.COUPLED])
def test_the_trees_of_a_drafter_share_the_nodes_ahead(law: DraftMode) -> None:
    """By their number alone: what a tree may have does not depend on any node."""

    def most_nodes(num_trees: int) -> int:
        drafter = idle(Grower(Counting(40, seed=3, max_slots=8), incarnation=9, ahead_budget=BUDGET))
        for slot in range(num_trees):
            opened = opening(slot, law=law, node_cap=4, ahead_cap=24, node_budget=4)
            assert drafter.open(slot, opened) is None
            launch(drafter, slot)
        for growing in drafter.trees.values():  # from the next commit on, all of them are counted
            growing.limit(4, ahead_share=drafter.ahead_share(num_trees, ratio=growing.ratio))
        grown(drafter)
        return max(len(growing.tree.nodes) for growing in drafter.trees.values())

    assert most_nodes(1) > 4 + 12
    assert 4 < most_nodes(3) <= 4 + 8
    assert (most_nodes(5) > 4) is not law.ratio  # of many trees too few keep nodes
