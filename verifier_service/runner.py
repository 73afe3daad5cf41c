"""One engine step on the target model: rows → ONE forward → processed laws → verdicts → KV commit. Runs on the model's thread.

Nothing here knows of streams, sessions or time. Host work per round is O(tree × K); whatever is O(V) stays where the logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.living_tree import Row, Snapshot
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key, bonus_coin, coins, target_gumbel
from rootward.core.tree import TokenTree, root_only
from rootward.core.verification import match
from rootward.core.verification.sparse import SparseLaw, gather_ids, sparse_law
from rootward.core.verification.verdict import stop_node
from rootward.engine.residual import draw_residual, gumbel_choice
from rootward.engine.sampling import gather, greedy_choice, processed
from rootward.ports import COMMITTED, LanguageModel, Rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Decide = Callable[[str, TokenTree, Ints, Ints, Floats, Floats], SparseLaw]  # the signature of `sparse_law`


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill: tokens that extend the committed chain of a KV slot."""

    kv_slot: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Verification of one session: root token, its absolute position + 1 = length of the committed text, and a tree (None: none)."""

    kv_slot: int
    root: int
    length: int
    rule: Rule
    sampling: Sampling
    key: Key
    epoch: int
    snapshot: Snapshot | None = None

    @property
    def tree(self) -> TokenTree:
        return self.snapshot.tree if self.snapshot is not None else root_only()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round committed: accepted draft tokens, then the bonus token. `expected` is the closed-form block efficiency of the
    tree (free of coin noise); 0 under target matching."""

    tokens: tuple[int, ...]
    num_nodes: int
    expected: float = 0.0


class Runner:
    """Drives a target model. `decide` is the verification law; tests swap in wrong ones to see that they are caught."""

    def __init__(self, model: LanguageModel, *, decide: Decide = sparse_law) -> None:
        self.model, self.decide = model, decide

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        self.model.forward([Rows.chain(c.kv_slot, 0, c.tokens) for c in chunks], last_only=[True] * len(chunks))
        for chunk in chunks:
            self.model.commit(chunk.kv_slot, len(chunk.tokens) - 1, keep_below=False)

    def verify(self, rounds: Sequence[Round]) -> list[Outcome]:
        """One round for every session, in order."""
        logits_TV = self.model.forward([_rows(r) for r in rounds])
        ends = np.cumsum([len(r.tree) for r in rounds])
        starts = ends - [len(r.tree) for r in rounds]
        verdicts = self._by_match(rounds, starts, logits_TV) | self._by_ratio(rounds, starts, logits_TV)
        outcomes = []
        for i, r in enumerate(rounds):
            stop, bonus, expected = verdicts[i]
            tree = r.tree
            # The invariant that keeps a verified node from being verified twice (algorithms.md, L4).
            assert r.rule is Rule.MATCH or all(tree.token[c] != bonus for c in tree.children[stop])
            self.model.commit(r.kv_slot, stop, keep_below=False)
            outcomes.append(Outcome((*tree.path(stop), bonus), len(tree) - 1, expected))
        return outcomes

    # -- target matching: one choice of the target per node -----------------------------------------------------------

    def _by_match(
        self, rounds: Sequence[Round], starts: Ints, logits_TV: torch.Tensor
    ) -> dict[int, tuple[int, int, float]]:
        mine = [i for i, r in enumerate(rounds) if r.rule is Rule.MATCH]
        verdicts: dict[int, tuple[int, int, float]] = {}
        for greedy in (True, False):
            group = [i for i in mine if rounds[i].sampling.greedy is greedy]
            if not group:
                continue
            take = np.concatenate([np.arange(starts[i], starts[i] + len(rounds[i].tree)) for i in group])
            chosen = (
                greedy_choice(logits_TV[take])
                if greedy
                else self._noisy_choice([rounds[i] for i in group], logits_TV[take])
            )
            at = 0
            for i in group:
                size = len(rounds[i].tree)
                verdicts[i] = (*match(rounds[i].tree, chosen[at : at + size]), 0.0)
                at += size
        return verdicts

    def _noisy_choice(self, rounds: Sequence[Round], logits_TV: torch.Tensor) -> Ints:
        """argmax log p + g with noise keyed by (seed, absolute position): the same token whatever the tree or the drafter."""
        probs_TV = processed(logits_TV, [r.sampling for r in rounds for _ in range(len(r.tree))])
        vocab = int(probs_TV.shape[1])
        noise_TV = np.concatenate([_noise_by_depth(r, vocab) for r in rounds])
        return gumbel_choice(probs_TV, noise_TV)

    # -- ratio tests: laws, coins, one bonus draw ---------------------------------------------------------------------

    def _by_ratio(
        self, rounds: Sequence[Round], starts: Ints, logits_TV: torch.Tensor
    ) -> dict[int, tuple[int, int, float]]:
        mine = [i for i, r in enumerate(rounds) if r.rule is not Rule.MATCH]
        if not mine:
            return {}
        take = np.concatenate([np.arange(starts[i], starts[i] + len(rounds[i].tree)) for i in mine])
        probs_TV = processed(logits_TV[take], [rounds[i].sampling for i in mine for _ in range(len(rounds[i].tree))])
        decided = self._laws([rounds[i] for i in mine], probs_TV)
        stops, at = [], 0
        stop_rows, scale, ids, mass, u = [], [], [], [], []
        for i, law in zip(mine, decided, strict=True):
            r = rounds[i]
            stop = stop_node(law, coins(r.key, r.epoch, r.length, np.arange(len(r.tree))))
            stops.append(stop)
            stop_rows.append(at + stop)
            scale.append(law.tail_scale[stop])
            ids.append(law.ids[stop])
            mass.append(law.residual[stop])
            u.append(bonus_coin(r.key, r.epoch, r.length + int(r.tree.depth[stop])))
            at += len(r.tree)
        bonus = draw_residual(probs_TV[stop_rows], np.array(scale), ids, mass, np.array(u))
        return {
            i: (stop, int(token), law.block_efficiency)
            for i, stop, token, law in zip(mine, stops, bonus, decided, strict=True)
        }

    def _laws(self, rounds: Sequence[Round], probs_TV: torch.Tensor) -> list[SparseLaw]:
        columns = [_atoms(r) for r in rounds]
        gathered = [gather_ids(r.tree, ids) for r, (ids, _) in zip(rounds, columns, strict=True)]
        width = max(g.shape[1] for g in gathered)
        flat = np.concatenate([np.pad(g, ((0, 0), (0, width - g.shape[1])), constant_values=-1) for g in gathered])
        p_TG, tail_T = gather(probs_TV, flat)
        whole_T = p_TG.sum(-1) + tail_T  # float32 softmax: 1 up to rounding
        p_TG, tail_T = p_TG / whole_T[:, None], tail_T / whole_T
        out, at = [], 0
        for r, (_, weight), ids in zip(rounds, columns, gathered, strict=True):
            rows = slice(at, at + len(r.tree))
            out.append(self.decide(r.rule.value, r.tree, ids, weight, p_TG[rows, : ids.shape[1]], tail_T[rows]))
            at += len(r.tree)
        return out


def _rows(r: Round) -> Rows:
    tree = r.tree
    token = tree.token.copy()
    token[0] = r.root
    node = np.arange(len(tree), dtype=np.int64)
    parent = np.where(tree.parent < 0, COMMITTED, tree.parent)
    return Rows(r.kv_slot, node, parent, token)


def _noise_by_depth(r: Round, vocab: int) -> Floats:
    """float64[N, V]: nodes of one depth share the noise of their position."""
    by_depth = np.stack([target_gumbel(r.key, r.length + d, vocab) for d in range(int(r.tree.depth.max()) + 1)])
    return by_depth[r.tree.depth]


def _atoms(r: Round) -> tuple[Ints, Ints]:
    """(ids int64[N, K], weight int64[N, K]) of the declared rows, padded with -1 and 0."""
    rows: Sequence[Row | None] = r.snapshot.rows if r.snapshot is not None else (None,)
    width = max((len(row[0]) for row in rows if row is not None), default=0)
    ids = np.full((len(rows), width), -1, dtype=np.int64)
    weight = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        if row is not None:
            ids[i, : len(row[0])], weight[i, : len(row[1])] = row
    return ids, weight
