"""A draft head whose distributions depend on features, enumerated through the code that grows its trees: whatever the features are, the
text has the target's law; and a twin that asks the tree how large it should be is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.heads import TabularHead
from support.rounds import Chooser, Model, V, decide, draw_by, put, tail_law

from rootward.core.frames import Open
from rootward.core.growth import BestFirst
from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.requests import DraftMode, Sampling
from rootward.engine.atoms import reduced
from rootward.engine.slots import kept_rows
from rootward.engine.tabular import TabularModel
from rootward.ports import Reduction, Rows, TreeToGrow
from verifier_service.head_drafts import HeadDrafts

PROMPT, LENGTH = (0, 1, 2), 2
EXACT, SEEN = 1e-12, 1e-4
SEEDS = range(8)
# What the head sees of each token's past, round by round: the truth, another text's, or nothing.
SCRIPTS = {
    "right": ("right", "right"),
    "wrong, then right": ("wrong", "right"),
    "right, then missing": ("right", "missing"),
    "missing, then right": ("missing", "right"),
    "begun anew": ("right", "anew"),
    "right, then looked up": ("right", "looked up"),
    "looked up, then right": ("looked up", "right"),
}
Cut = Callable[["Walk", Snapshot], int]  # a wrong twin: how many nodes of a grown tree are verified
Instead = Callable[["Walk", Snapshot], bool]  # a wrong twin: whether a tree that is looked up replaces a grown one


class ModelHead(TabularHead):
    """Draws from the integer rows q of a `Model`."""

    def __init__(self, model: Model) -> None:
        super().__init__(TabularModel(V, max_slots=1), max_slots=1)
        self.model = model

    def _compute(self, key: tuple[int, ...]) -> np.ndarray:
        row = self.model.q[key]
        weight = np.zeros(V)
        weight[row.ids] = row.weight
        with np.errstate(divide="ignore"):
            return np.log(weight / weight.sum())


class BlockOfModel(ModelHead):
    """A block head: rows of text come with those of the depths below, whatever the paths are."""

    num_marginals = 2

    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        first = super().forward(batch, num_logits=num_logits)
        last = [
            int(rows.token[i]) for rows, kept in zip(batch, kept_rows(batch, num_logits), strict=True) for i in kept
        ]
        below = torch.from_numpy(np.stack([self.log_law([token, token % 2]) for token in last]))
        return reduced(torch.stack([first, below], 1).flatten(0, 1), reduction)


class Walk:
    """One session, round after round."""

    def __init__(
        self,
        seed: int,
        mode: DraftMode,
        chooser: Chooser,
        *,
        nodes: int = 2,
        cut: Cut | None = None,
        instead: Instead | None = None,
        head: type[ModelHead] = ModelHead,
    ) -> None:
        self.model, self.chooser, self.nodes, self.cut = Model(seed), chooser, nodes, cut
        self.instead = instead
        shape = BestFirst(max_depth=2, topk=2, draws_per_level=1 + (mode is DraftMode.GREEDY), root_family=(0.4, 0.3))
        self.heads = HeadDrafts(head(self.model), incarnation=1, best_first=shape)
        self.opening = Open(0, 0, (), Sampling(), mode, 1, 0, num_atoms=V, node_cap=nodes, max_depth=2, topk=2)

    def run(self, script: tuple[str, ...], out: np.ndarray) -> None:
        heads, text = self.heads, list(PROMPT)
        heads.forget(1)
        states = torch.tensor([[float(token)] for token in text[:-1]])
        heads.observe(1, 0, states)
        for what in script:
            if len(text) - len(PROMPT) >= LENGTH:
                break
            self.degrade(what, text)
            if what == "looked up":  # the head is not asked
                snapshot = looked_up(text)
            else:
                (snapshot,) = heads.grow([TreeToGrow(1, text, self.opening, self.nodes)])
            if snapshot is not None and self.instead is not None and self.instead(self, snapshot):
                snapshot = looked_up(text)
            if snapshot is not None and self.cut is not None:
                tree = heads._grower.trees[1].tree
                snapshot = tree.snapshot(self.cut(self, snapshot))
            snapshot = snapshot or LivingTree(len(text), 0, vocab_size=V).snapshot(0)
            law = decide(self.model, snapshot, text)
            stop = self.chooser.choose(law.stop)
            bonus = self.chooser.choose(law.bonus_row(stop))
            tokens = [*snapshot.tree.path(stop), bonus]
            heads.observe(1, len(text) - 1, torch.tensor([[float(t)] for t in [text[-1], *tokens[:-1]]]))
            text += tokens
        put(out, self.model, text, len(PROMPT), self.chooser.mass)

    def degrade(self, what: str, text: list[int]) -> None:
        heads = self.heads
        heads.model.wrong = int(what == "wrong")  # type: ignore[attr-defined]
        if what == "missing":
            heads.forget(1)
        elif what == "anew":
            heads.forget(1)
            heads.observe(1, len(text) - 2, torch.tensor([[float(text[-2])]]))


def looked_up(text: Sequence[int]) -> Snapshot:
    """A tree that follows from the text alone; its node is chosen."""
    tree = LivingTree(len(text), 0, vocab_size=V)
    tree.root.token = text[-1]
    tree.draw(tree.root_id, (text[-1] + 1) % V, sampled=False)
    return tree.snapshot(1)


def error(seed: int, mode: DraftMode, script: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **twin) -> float:
    chooser, out = Chooser(), np.zeros((V,) * LENGTH)
    with monkeypatch.context() as patch:
        draw_by(chooser, patch)
        walk = Walk(seed, mode, chooser, **twin)
        chooser.runs(lambda: walk.run(script, out))
    assert out.sum() == pytest.approx(1.0, abs=1e-12)
    return float(np.abs(out - tail_law(walk.model, list(PROMPT), 0, LENGTH)).max())


CASES = [*((script, DraftMode.SAMPLED) for script in SCRIPTS), ("wrong, then right", DraftMode.GREEDY)]


@pytest.mark.parametrize(("script", "mode"), CASES, ids=lambda v: getattr(v, "value", v))
def test_text_has_the_target_s_law_whatever_the_features_are(script: str, mode: DraftMode, monkeypatch) -> None:
    assert max(error(seed, mode, SCRIPTS[script], monkeypatch) for seed in SEEDS) < EXACT


@pytest.mark.parametrize("mode", [DraftMode.SAMPLED, DraftMode.GREEDY], ids=lambda mode: mode.value)
def test_text_has_the_target_s_law_under_marginals_of_a_block(mode: DraftMode, monkeypatch) -> None:
    script = SCRIPTS["wrong, then right"]
    assert max(error(seed, mode, script, monkeypatch, head=BlockOfModel) for seed in SEEDS[:4]) < EXACT


def test_cutting_a_tree_of_marginals_by_its_own_values_is_seen(monkeypatch) -> None:
    twin = {"cut": unlikely_ones_go, "head": BlockOfModel}
    assert max(error(seed, DraftMode.SAMPLED, ("right", "right"), monkeypatch, **twin) for seed in SEEDS[:4]) > SEEN


def unlikely_ones_go(walk: Walk, grown: Snapshot) -> int:
    """The tree is cut before its first node that the head found unlikely."""
    for i in range(1, len(grown.tree)):
        row = grown.rows[int(grown.tree.parent[i])]
        if row is not None and row[1][row[0] == grown.tree.token[i]].sum() < 0.4 * row[1].sum():
            return i - 1
    return walk.nodes


def first_is_unlikely(walk: Walk, grown: Snapshot) -> bool:
    return unlikely_ones_go(walk, grown) == 0


def test_look_up_in_place_of_a_tree_with_unlikely_values_is_seen(monkeypatch) -> None:
    """Which draft a round takes is settled before the head has drawn (`LocalDrafts.plan`)."""
    twin = {"instead": first_is_unlikely}
    errors = [error(seed, DraftMode.SAMPLED, ("right", "right"), monkeypatch, **twin) for seed in SEEDS[:4]]
    assert max(errors) > SEEN


def test_cutting_a_tree_by_its_own_values_is_seen(monkeypatch) -> None:
    errors = [
        error(seed, DraftMode.SAMPLED, ("right", "right"), monkeypatch, cut=unlikely_ones_go) for seed in SEEDS[:4]
    ]
    assert max(errors) > SEEN
