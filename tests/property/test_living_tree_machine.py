"""The living tree as a state machine: a drafter, a verifier, and links that delay, duplicate, reorder and drop.

The model knows the full text under which every node was drawn. Whatever the links do, the verifier's tree must be exactly the nodes
that arrived without a gap and still continue the truth, in draw order, each under the text it was drawn under (I1, I3, I4, I6); of
guesses only those that the first round after they were made walked over.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rootward.core.frames import Grow, extend_hash
from rootward.core.living_tree import ROOT, LivingTree

VOCAB = 3
PROMPT = (1, 2)
ATOMS = (np.arange(VOCAB), np.array([3, 2, 1]))


def new_tree(text: tuple[int, ...]) -> LivingTree:
    value = 0
    for token in text:
        value = extend_hash(value, token)
    return LivingTree(len(text), value, vocab_size=VOCAB, node_cap=64, ahead_cap=64)


class TwoReplicas(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.truth = PROMPT  # at the verifier
        self.heard = PROMPT  # at the drafter
        self.opened = 0
        self.reopen()

    def reopen(self) -> None:
        """What a verifier does with a broken tree: a new slot, a new tree on both sides, nothing in flight."""
        self.heard = self.truth
        self.verifier, self.drafter = new_tree(self.truth), new_tree(self.truth)
        self.text: dict[int, tuple[int, ...]] = {}  # node id -> text it spells, as drawn
        self.head: dict[int, int] = {}  # node id -> the guess it is or hangs below, ROOT for none
        self.drawn_under: dict[int, int] = {}  # node id -> length of the drafter's prefix at that moment
        self.ends: list[int] = []  # lengths of the truth after each round
        self.frames: list[Grow] = []
        self.commits: list[tuple[int, ...]] = []
        self.sent = 1
        self.next_arrival = 1  # ids below have arrived without a gap

    # -- the drafter

    def drafter_text(self, node: int) -> tuple[int, ...]:
        return self.heard if node in (ROOT, self.drafter.root_id) else self.text[node]

    @rule(data=st.data(), guess=st.sampled_from([False, False, True]))
    def draw(self, data: st.DataObject, guess: bool) -> None:
        places = [
            n
            for n in [self.drafter.root_id, *self.drafter.nodes]
            if len(self.drafter.at(n).children) < VOCAB
            and self.drafter.at(n).depth - self.drafter.length < 4
            and not (guess and self.drafter.at(n).head != ROOT)
        ]
        if len(self.drafter.nodes) >= 20 or not places:
            return
        parent = data.draw(st.sampled_from(places))
        self.drafter.at(parent).row = ATOMS
        taken = {self.drafter.nodes[c].token for c in self.drafter.at(parent).children}
        token = data.draw(st.sampled_from([t for t in range(VOCAB) if t not in taken]))
        above = self.drafter_text(parent)
        node = self.drafter.draw(parent, token, sampled=not guess, guess=guess)
        self.text[node] = (*above, token)
        self.head[node], self.drawn_under[node] = self.drafter.nodes[node].head, len(self.heard)

    @rule()
    def send(self) -> None:
        ids = list(range(self.sent, self.drafter.next_id))
        if not ids:
            return
        records = [self.drafter.nodes[n] for n in ids]
        column = lambda values, kind: np.array(values, dtype=kind)  # noqa: E731
        self.frames.append(
            Grow(
                1,
                self.drafter.length,
                self.drafter.hash,
                self.sent,
                column([r.parent for r in records], np.int64),
                column([r.token for r in records], np.int64),
                column([r.sampled for r in records], np.bool_),
                {r.parent: ATOMS for r in records if r.sampled},
                guess=column([r.guess for r in records], np.bool_),
            )
        )
        self.sent = self.drafter.next_id

    @precondition(lambda self: self.commits)
    @rule()
    def hear_commit(self) -> None:
        self.send()  # what was drawn under the old base leaves under it
        tokens = self.commits.pop(0)
        self.drafter.commit(tokens)
        self.heard += tokens

    # -- the link

    @precondition(lambda self: self.frames)
    @rule(keep=st.booleans(), which=st.sampled_from([0, 0, 0, 1, 2]))
    def deliver(self, keep: bool, which: int) -> None:
        """In order (0) or out of order; `keep` leaves a duplicate behind."""
        frame = self.frames[min(which, len(self.frames) - 1)]
        if not keep:
            self.frames = [f for f in self.frames if f is not frame]
        self.verifier.receive(frame)
        if not self.verifier.broken:
            self.next_arrival = max(self.next_arrival, frame.first_node + len(frame.token))

    @precondition(lambda self: self.frames)
    @rule()
    def lose_frame(self) -> None:
        self.frames.pop(0)

    # -- the verifier

    @rule(data=st.data(), cap=st.integers(0, 6))
    def verdict(self, data: st.DataObject, cap: int) -> None:
        """A path of the verified nodes, then a bonus token that is no tried child of its end."""
        if len(self.truth) > 40:
            return
        tree = self.verifier.snapshot(cap).tree
        stop = data.draw(st.integers(0, len(tree) - 1))
        tried = {int(tree.token[c]) for c in tree.children[stop]}
        free = [t for t in range(VOCAB) if t not in tried]
        if not free:
            return
        tokens = (*tree.path(stop), data.draw(st.sampled_from(free)))
        self.verifier.commit(tokens)
        self.truth += tokens
        self.ends.append(len(self.truth))
        self.commits.append(tokens)

    @precondition(lambda self: self.verifier.broken)
    @rule()
    def open_anew(self) -> None:
        self.opened += 1
        self.reopen()

    # -- what must hold

    @invariant()
    def prefixes_only_grow_and_agree(self) -> None:
        assert self.truth[: len(self.heard)] == self.heard
        assert self.verifier.length == len(self.truth)
        assert self.drafter.length == len(self.heard)

    def alive(self, node: int, text: tuple[int, ...]) -> bool:
        """Whether a node belongs to the tree below this text."""
        if len(self.text[node]) <= len(text) or self.text[node][: len(text)] != text:
            return False
        guess = self.head[node]
        if guess == ROOT:
            return True
        rounds = [end for end in self.ends if self.drawn_under[guess] < end <= len(text)]
        return not rounds or len(self.text[guess]) <= rounds[0]

    @invariant()
    def verifier_holds_what_arrived_and_continues_the_truth(self) -> None:
        size = len(self.truth)
        wanted = [node for node in range(1, self.next_arrival) if self.alive(node, self.truth)]
        assert list(self.verifier.nodes) == wanted  # nothing lost, nothing stale, draw order
        own = [n for n in wanted if self.head[n] == ROOT or len(self.text[self.head[n]]) <= size]
        assert list(self.verifier.snapshot(64).ids[1:]) == own  # guesses are never verified
        assert len(self.verifier) == len(own)
        snapshot = self.verifier.snapshot(64)
        for index, node in enumerate(snapshot.ids[1:], start=1):
            assert self.truth + snapshot.tree.path(index) == self.text[node]  # I3

    @invariant()
    def drafter_keeps_its_whole_subtree(self) -> None:
        assert list(self.drafter.nodes) == [node for node in self.text if self.alive(node, self.heard)]


TwoReplicas.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestTwoReplicas = TwoReplicas.TestCase
