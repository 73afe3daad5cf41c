"""One engine step on the target model: rows → ONE forward → processed laws → verdicts → KV commit. Runs on the model's thread.

Nothing here knows of streams, sessions or time. Host work per round is O(tree × K); whatever is O(V) stays where the logits are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.living_tree import Row, Snapshot
from rootward.core.requests import Rule, Sampling, TokenLogprob
from rootward.core.rng import Key, bonus_coin, bonus_coins, coins_batch
from rootward.core.tree import TokenTree, root_only
from rootward.core.verification import match
from rootward.core.verification.batched import Forest, ForestLaw, forest_law, gather_ids, stop_nodes
from rootward.engine.logprobs import token_logprobs
from rootward.engine.noise import target_noise
from rootward.engine.processors import Prefix, adjusted
from rootward.engine.residual import draw_residual, gumbel_choice, largest_residual
from rootward.engine.sampling import gather, greedy_choice, laws
from rootward.engine.verification import place, verify
from rootward.ports import COMMITTED, LanguageModel, Rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
FILL = 1 << 40  # ids of the end of the prefill among the nodes of a round

Decide = Callable[[str, Forest, Ints, Ints, Floats, Floats], ForestLaw]  # the signature of `forest_law`


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill: tokens that extend the committed chain of a KV slot.

    follow: the token after each of the first ones, where log-probabilities of the prompt are wanted; the step puts them into `told`.
    """

    kv_slot: int
    tokens: tuple[int, ...]
    follow: tuple[int, ...] = ()
    num_top: int = 0
    told: list[TokenLogprob] = field(default_factory=list)

    @property
    def num_logits(self) -> int:
        return len(self.tokens) if self.follow else 1


@dataclass(frozen=True, slots=True)
class Round:
    """Verification of one session: root token, its absolute position + 1 = length of the committed text, and a tree (None: none).

    `prefix` is what processors know of that text; `logprobs` as in `VerifierRequest`; `shared`: the bonus token follows noise that
    the drafter knows (algorithms.md 6.6); `fill`: the end of the prefill, tokens right before the root whose KV the same forward makes."""

    kv_slot: int
    root: int
    length: int
    rule: Rule
    sampling: Sampling
    key: Key
    epoch: int
    snapshot: Snapshot | None = None
    prefix: Prefix = field(default_factory=Prefix)
    logprobs: int | None = None
    shared: bool = False
    fill: tuple[int, ...] = ()

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
    path: tuple[int, ...] = ()  # numbers of the accepted nodes, in draw order from 1
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token where they are asked for


class Runner:
    """Drives a target model. `decide` is the verification law; tests swap in wrong ones to see that they are caught. there: ratio tests
    are decided where the logits are, and nothing but stop nodes and bonus tokens comes back (default: where that is no CPU)."""

    def __init__(self, model: LanguageModel, *, decide: Decide = forest_law, there: bool | None = None) -> None:
        self.model, self.decide, self._there = model, decide, there

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        self.step(chunks, [])

    def verify(self, rounds: Sequence[Round]) -> list[Outcome]:
        """One round for every session, in order."""
        return self.step([], rounds)

    def step(self, chunks: Sequence[Chunk], rounds: Sequence[Round]) -> list[Outcome]:
        """Prefill and rounds in ONE forward; the outcomes of the rounds, in order."""
        batch = [Rows.chain(c.kv_slot, 0, c.tokens) for c in chunks] + [_rows(r) for r in rounds]
        num_logits = [c.num_logits for c in chunks] + [len(r.tree) for r in rounds]
        logits_TV = self.model.forward(batch, num_logits=num_logits)
        self._filled(chunks, logits_TV)
        return self._decided(rounds, logits_TV[sum(c.num_logits for c in chunks) :]) if rounds else []

    def _filled(self, chunks: Sequence[Chunk], logits_TV: torch.Tensor) -> None:
        at = 0
        for chunk in chunks:
            if chunk.follow:
                rows = logits_TV[at : at + len(chunk.follow)]
                chunk.told.extend(token_logprobs(rows, chunk.follow, chunk.num_top))
            at += chunk.num_logits
            self.model.commit(chunk.kv_slot, len(chunk.tokens) - 1, keep_below=False)

    def _decided(self, rounds: Sequence[Round], logits_TV: torch.Tensor) -> list[Outcome]:
        """Verdicts on the logits of all rows of all rounds; what they accept is committed to the KV cache."""
        ends = np.cumsum([len(r.tree) for r in rounds])
        starts = ends - [len(r.tree) for r in rounds]
        scores_TV = adjusted(logits_TV, [(r.sampling, r.prefix, r.tree) for r in rounds])
        verdicts = self._by_match(rounds, starts, scores_TV)
        for rule in (Rule.TRAVERSAL, Rule.TOKEN):
            verdicts |= self._by_ratio(rule, rounds, starts, scores_TV)
        outcomes = []
        for i, r in enumerate(rounds):
            stop, bonus, expected = verdicts[i]
            tree = r.tree
            # The invariant that keeps a verified node from being verified twice (algorithms.md, L4).
            assert r.rule is Rule.MATCH or bonus not in tree.token[tree.parent == stop]
            self.model.commit(r.kv_slot, stop, keep_below=False)
            tokens = (*tree.path(stop), bonus)
            logprobs = _logprobs(r, int(starts[i]), stop, tokens, logits_TV)
            path = tuple(np.flatnonzero(tree.ancestors[stop])[1:].tolist())
            outcomes.append(Outcome(tokens, len(tree) - 1, expected, path, logprobs))
        return outcomes

    # -- target matching: one choice of the target per node -----------------------------------------------------------

    def _by_match(
        self, rounds: Sequence[Round], starts: Ints, scores_TV: torch.Tensor
    ) -> dict[int, tuple[int, int, float]]:
        mine = [i for i, r in enumerate(rounds) if r.rule is Rule.MATCH]
        verdicts: dict[int, tuple[int, int, float]] = {}
        for greedy in (True, False):
            group = [i for i in mine if rounds[i].sampling.greedy is greedy]
            if not group:
                continue
            take = np.concatenate([np.arange(starts[i], starts[i] + len(rounds[i].tree)) for i in group])
            chosen = (
                greedy_choice(scores_TV[take])
                if greedy
                else self._noisy_choice([rounds[i] for i in group], scores_TV[take])
            )
            at = 0
            for i in group:
                size = len(rounds[i].tree)
                verdicts[i] = (*match(rounds[i].tree, chosen[at : at + size]), 0.0)
                at += size
        return verdicts

    def _noisy_choice(self, rounds: Sequence[Round], scores_TV: torch.Tensor) -> Ints:
        """argmax log p + g with noise keyed by (seed, absolute position): the same token whatever the tree or the drafter."""
        probs_TV = laws(scores_TV, [r.sampling for r in rounds for _ in range(len(r.tree))])
        at: list[tuple[Key, int]] = []
        row_T: list[int] = []
        for r in rounds:  # nodes of one depth share the noise of their position
            row_T += (len(at) + r.tree.depth).tolist()
            at += [(r.key, r.length + d) for d in range(int(r.tree.depth.max()) + 1)]
        noise_PV = target_noise(at, int(probs_TV.shape[1]), probs_TV.device)
        return gumbel_choice(probs_TV, noise_PV, np.array(row_T))

    # -- ratio tests: laws, coins, one bonus draw ---------------------------------------------------------------------

    def _by_ratio(
        self, rule: Rule, rounds: Sequence[Round], starts: Ints, scores_TV: torch.Tensor
    ) -> dict[int, tuple[int, int, float]]:
        mine = [i for i, r in enumerate(rounds) if r.rule is rule]
        if not mine:
            return {}
        some = [rounds[i] for i in mine]
        forest = Forest.of([r.tree for r in some])
        take = np.arange(forest.num_nodes) + (starts[mine] - forest.start[:-1])[forest.tree]
        probs_TV = laws(scores_TV[take], [some[b].sampling for b in forest.tree])
        if self._decides_there(some, probs_TV.device):
            found = _decided_there(rule, forest, some, probs_TV)
            nodes = found[0] - forest.start[:-1]
            return dict(
                zip(mine, zip(nodes.tolist(), *(column.tolist() for column in found[1:]), strict=True), strict=True)
            )
        law = self._law(rule, forest, some, probs_TV)
        stop = stop_nodes(law, coins_batch([(r.key, r.epoch, r.length, range(len(r.tree))) for r in some])).copy()
        bonus = self._bonus(some, stop, law, probs_TV)
        nodes, expected = stop - forest.start[:-1], law.block_efficiency
        return dict(zip(mine, zip(nodes.tolist(), bonus.tolist(), expected.tolist(), strict=True), strict=True))

    def _decides_there(self, rounds: Sequence[Round], device: torch.device) -> bool:
        """Bonus tokens that follow the noise a drafter knows are found by the host, which makes that noise for the stop node alone."""
        there = device.type != "cpu" if self._there is None else self._there
        return there and self.decide is forest_law and not any(r.shared for r in rounds)

    @staticmethod
    def _bonus(rounds: Sequence[Round], stop: Ints, law: ForestLaw, probs_TV: torch.Tensor) -> Ints:
        """int64[B]: a sample of each round's residual distribution at its stop node."""
        at = [(r.key, r.epoch, r.length + int(d)) for r, d in zip(rounds, law.forest.depth[stop], strict=True)]
        bonus = np.empty(len(rounds), dtype=np.int64)
        for shared in (False, True):
            mine = [b for b, r in enumerate(rounds) if r.shared is shared]
            if not mine:
                continue
            here, places = stop[mine], [at[b] for b in mine]
            residual = probs_TV[here], law.tail_scale[here], list(law.ids[here]), list(law.residual[here])
            if shared:
                bonus[mine] = largest_residual(*residual, places)
            else:
                bonus[mine] = draw_residual(*residual, np.array([bonus_coin(*place) for place in places]))
        return bonus

    def _law(self, rule: Rule, forest: Forest, rounds: Sequence[Round], probs_TV: torch.Tensor) -> ForestLaw:
        atoms, weight = _atoms(rounds)
        ids = gather_ids(forest, atoms)
        p_TG, tail_T = gather(probs_TV, ids)
        whole_T = p_TG.sum(-1) + tail_T  # float32 softmax: 1 up to rounding
        return self.decide(rule.value, forest, ids, weight, p_TG / whole_T[:, None], tail_T / whole_T)


def _decided_there(
    rule: Rule, forest: Forest, rounds: Sequence[Round], probs_TV: torch.Tensor
) -> tuple[Ints, Ints, Floats]:
    """(stop node in the forest, bonus token, block efficiency) of every round; the host waits for the device once."""
    atoms, weight = _atoms(rounds)
    device, depths = probs_TV.device, int(forest.depth.max()) + 1
    placed = place(forest, gather_ids(forest, atoms), weight, int(probs_TV.shape[1]), device)
    coins = coins_batch([(r.key, r.epoch, r.length, range(len(r.tree))) for r in rounds])
    u_BD = bonus_coins([(r.key, r.epoch, r.length) for r in rounds], depths)
    tossed = [torch.from_numpy(given).to(device, non_blocking=True) for given in (coins, u_BD)]
    return verify(rule.value, placed, probs_TV, *tossed).to_host(len(rounds))


def _rows(r: Round) -> Rows:
    """The end of the prefill as a chain, the root at its end, the tree below."""
    tree, num = r.tree, len(r.fill)
    fill = FILL + np.arange(num, dtype=np.int64)
    parent = np.concatenate([fill - 1, tree.parent])
    parent[num] = FILL + num - 1
    parent[0] = COMMITTED
    token = np.concatenate([np.array([*r.fill, r.root], dtype=np.int64), tree.token[1:]])
    return Rows(r.kv_slot, np.concatenate([fill, np.arange(len(tree))]), parent, token)


def _logprobs(
    r: Round, start: int, stop: int, tokens: tuple[int, ...], logits_TV: torch.Tensor
) -> tuple[TokenLogprob, ...]:
    """Token i of the run follows node i of the path from the root to the stop node."""
    if r.logprobs is None:
        return ()
    rows = [start + int(node) for node in np.flatnonzero(r.tree.ancestors[stop])]  # parents come first
    return tuple(token_logprobs(logits_TV[rows], tokens, r.logprobs))


def _atoms(rounds: Sequence[Round]) -> tuple[Ints, Ints]:
    """(ids int64[T, K], weight int64[T, K]) of the declared rows of all nodes, padded with -1 and 0."""
    none: Row = np.empty(0, np.int64), np.empty(0, np.int64)
    rows = [row or none for r in rounds for row in (r.snapshot.rows if r.snapshot is not None else (None,))]
    size = np.array([len(row_ids) for row_ids, _ in rows])
    given = np.arange(size.max()) < size[:, None]
    ids, weight = np.full(given.shape, -1, dtype=np.int64), np.zeros(given.shape, dtype=np.int64)
    ids[given], weight[given] = (np.concatenate(column) for column in zip(*rows, strict=True))
    return ids, weight
