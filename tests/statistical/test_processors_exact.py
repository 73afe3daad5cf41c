"""The law of a round with processors, by enumeration through the verifier's runner: model, KV tree, processors, verification.

Draft trees of a fixed shape are drawn in every possible way from integer rows; for each, `Runner.verify` gives stop law, residuals and
processed rows. The mixture, continued by plain decoding, must be plain decoding's law: each token under its own whole text.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations, product

import numpy as np
import pytest
from support.processed_law import PROCESSORS, STOP, processed_law, text_law

import rootward.engine.verify as verify_module
from rootward.core.living_tree import Snapshot
from rootward.core.requests import DraftMode, Rule, Sampling, Stopping, VerifierRequest
from rootward.core.rng import Key
from rootward.core.tree import TokenTree
from rootward.engine.processors import History, _tails
from rootward.engine.tabular import TabularModel
from rootward.engine.verify import forest_law
from verifier_service.runner import Chunk, Round, Runner
from verifier_service.session import Session

V, LENGTH = 3, 3
PROMPT, OUTPUT = (1, 0, 1), (0, 0)  # token 2 is new to the repetition penalty
PARENT = (-1, 0, 0, 1, 2)  # two children of the root, one below each
SEEDS = range(8)


def trees(rng: np.random.Generator):
    """(probability, snapshot) of every tree of this shape; children are drawn from integer rows without replacement."""
    weights = {path: rng.integers(1, 6, V) for path in [(), *product(range(V), repeat=1)]}
    ids = np.arange(V)
    for (a, b), x, y in product(permutations(range(V), 2), range(V), range(V)):
        top, below_a, below_b = weights[()], weights[a,], weights[b,]
        chance = top[a] / top.sum() * top[b] / (top.sum() - top[a])
        chance *= below_a[x] / below_a.sum() * below_b[y] / below_b.sum()
        tree = TokenTree((0, a, b, x, y), PARENT, [True] * 5)
        rows = ((ids, top), (ids, below_a), (ids, below_b), None, None)
        yield chance, Snapshot(tree, tuple(range(5)), rows)


class Recorder:
    """A runner whose laws are kept: processed rows, and stop law and residuals of the round."""

    def __init__(self, model: TabularModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def recorded(scores, sampling):
            self.rows = distributions(scores, sampling)
            return self.rows

        def decided(*args):
            self.law = forest_law(*args)
            return self.law

        monkeypatch.setattr(verify_module, "distributions", recorded)
        self.model, self.runner = model, Runner(model, law=decided)

    def round_law(self, session: Session, rule: Rule, snapshot: Snapshot) -> dict[tuple[int, ...], float]:
        """Probability of each run that the round may commit."""
        slot, text = self.model.open(), session.tokens
        self.runner.step([Chunk(slot, tuple(text[:-1]))], [])
        sampling = session.request.sampling
        self.runner.step([], [Round(slot, text[-1], len(text), rule, sampling, Key(1), 1, snapshot, session.prefix)])
        self.model.close(slot)
        rows, tree = self.rows.numpy(), snapshot.tree
        runs: dict[tuple[int, ...], float] = defaultdict(float)
        if rule is Rule.MATCH:
            reach = np.ones(len(tree))
            for node in range(len(tree)):
                children = {int(tree.token[c]): c for c in tree.children[node]}
                for token in range(V):
                    if token in children:
                        reach[children[token]] = reach[node] * rows[node, token]
                    else:
                        runs[*tree.path(node), token] += reach[node] * rows[node, token]
            return runs
        for node in range(len(tree)):
            after = rows[node] * self.law.tail_scale[node]
            given = self.law.ids[node] >= 0
            after[self.law.ids[node][given]] = self.law.residual[node][given]
            for token in range(V):
                runs[*tree.path(node), token] += self.law.stop[node] * after[token]
        return runs


distributions = verify_module.distributions


def error(sampling: Sampling, min_tokens: int, rule: Rule, seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Largest difference between the law of the system and that of plain decoding, over all texts of LENGTH tokens."""
    model = TabularModel(V, seed=seed, sharpness=1.5, max_positions=64, tree_room=32)
    stopping = Stopping(30, (STOP,), min_tokens=min_tokens)
    wanted = VerifierRequest("r", PROMPT, sampling, stopping, committed=OUTPUT)
    session = Session(1, wanted, rule, DraftMode.SAMPLED, frozenset())

    def plain(run: tuple[int, ...]) -> np.ndarray:
        text = [*OUTPUT, *run]
        return processed_law(model.log_law([*PROMPT, *text]), PROMPT, text, sampling, min_tokens)

    recorder = Recorder(model, monkeypatch)
    got: dict[tuple[int, ...], float] = defaultdict(float)
    for chance, snapshot in trees(np.random.default_rng(seed)):
        for run, mass in recorder.round_law(session, rule, snapshot).items():
            if mass:
                for rest, share in text_law(lambda t, run=run: plain((*run, *t)), LENGTH - len(run)).items():
                    got[*run, *rest] += chance * mass * share
    expected = text_law(plain, LENGTH)
    return max(abs(got[text] - expected.get(text, 0.0)) for text in {*got, *expected})


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.TOKEN, Rule.MATCH])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_round_keeps_the_processed_law(name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        assert error(*PROCESSORS[name], rule, seed, monkeypatch) < 1e-12, seed


def under_the_root(history: History, tree: TokenTree):
    """Wrong: every node under the text of the root."""
    ids, counts, present = below(history, tree)
    return ids, np.broadcast_to(counts[0], counts.shape).copy(), np.broadcast_to(present[0], present.shape).copy()


below = History.below


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.TOKEN, Rule.MATCH])
@pytest.mark.parametrize("name", ["presence", "frequency", "repetition", "all"])
def test_the_text_of_the_root_for_all_nodes_is_caught(name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "below", under_the_root)
    assert max(error(*PROCESSORS[name], rule, seed, monkeypatch) for seed in SEEDS) > 1e-3


def test_min_tokens_counted_from_the_root_for_all_nodes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootward.engine.processors._hold_back", hold_all_back)
    assert max(error(*PROCESSORS["min_tokens"], Rule.TRAVERSAL, seed, monkeypatch) for seed in SEEDS) > 1e-3


def test_bad_words_looked_for_at_the_root_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootward.engine.processors._tails", tails_of_the_root)
    assert max(error(*PROCESSORS["bad_words"], Rule.TRAVERSAL, seed, monkeypatch) for seed in SEEDS) > 1e-3


def tails_of_the_root(output, tree, length):
    return np.broadcast_to(_tails(output, tree, length)[0], (len(tree), length))


def hold_all_back(rows, prefix, tree) -> None:
    rows[:, list(prefix.stop_ids)] = -np.inf
