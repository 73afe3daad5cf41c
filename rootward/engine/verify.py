"""Verification of a batch of rounds, for every rule and every device.

Work that is O(vocabulary) runs on the device of the rows: the mass of the tokens that a ratio test looks at, and bonus tokens. Work that is
O(nodes × atoms) runs on the host, after one small copy (docs/decisions/0023-verification-on-the-host.md).

`forest_law` is the batched form of `rootward.core.verification` for draft rows of bounded support (algorithms.md, section 7): a row is K
atoms with integer weights; G_v = atoms of row v ∪ tokens of v's chosen children. Outside G_v no draft distribution has mass, so STEP
treats everything there as one atom of target mass t, which only scales:

    a = min(1, w·P(x)/Q(x));  R = [w·P − Q]₊;  S = ΣR + w·t;  w' = S/(S + (1 − w));  P' = R/S;  t' = w·t/S

A child's STEP needs the entry budget of its parent, which its parent's own STEP gives, and what the STEPs of its earlier siblings left. So
children are handled one by one in the order of a `Forest.turn`, by compiled loops (`verify_kernels`):

    traversal    a becomes the child's budget, w' the parent's            "Traversal Verification" (2505.12398)
    block        traversal on a chain                                     "Block Verification" (2403.10444)
    token        every child starts with w = 1                            "Recursive Speculative Decoding" (2402.14160)
    multi_step   token-level, i.i.d. siblings in uniformly random order   "SpecInfer" (2305.09781)
    match        the target's own token per node                          algorithms.md, 5.8 and 5.9

Legend: B trees, T nodes of all trees, K atoms, G gathered tokens (the K atoms first), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from rootward.core.arrays import Bools, Floats, Ints
from rootward.core.audit import Draws
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key, Role, bonus_coin, coins_batch
from rootward.core.tree import TokenTree
from rootward.core.verification import match
from rootward.engine import verify_kernels as kernels
from rootward.engine.atoms import host_can_read
from rootward.engine.noise import At, coins_of_nodes, noisy_choice
from rootward.engine.sampling import distributions, greedy_choice

ALGORITHMS = ("traversal", "block", "token", "multi_step")
TOLERANCE = 1e-6  # on the sum of a target row
ORDER_IDS = 1 << 31  # coins from this node id on order the siblings under multi_step; those of the nodes come before


# -- rounds to verdicts ------------------------------------------------------------------------------------------------------


class Proposal(Protocol):
    """One round: a tree below the committed text, and how it is verified.

    rows    the declared draft distribution of each node, (ids int64[k], weight int64[k]); None where nothing was drawn
    length  of the committed text: the absolute position of the first token of the round
    shared  the bonus token follows noise that the drafter is told once the round runs (algorithms.md, 6.6)
    copies  siblings are i.i.d. copies, each drawn from the whole row; multi_step implies it
    """

    @property
    def tree(self) -> TokenTree: ...
    @property
    def rows(self) -> Sequence[tuple[Ints, Ints] | None]: ...
    @property
    def rule(self) -> Rule: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def key(self) -> Key: ...
    @property
    def epoch(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    @property
    def copies(self) -> bool: ...


class Decision(NamedTuple):
    """The path to node `stop` is committed, then the token `bonus`. `draws`: input of the audit of drafters; None under match."""

    stop: int
    bonus: int
    draws: Draws | None = None


@torch.inference_mode()
def decide(rounds: Sequence[Proposal], scores_TV: torch.Tensor, law: LawFunction | None = None) -> list[Decision]:
    """The verdict of every round, in order.

    scores_TV  processed logits (`processors.adjusted`), tree after tree, one row per node
    law        replaces `forest_law` in tests, which show that they detect wrong laws
    """
    ends = np.cumsum([len(r.tree) for r in rounds])
    decided: dict[int, Decision] = {}
    for method in (_match_greedy, _match_sampled, _without_tree, _ratio_test):
        indices = [i for i, r in enumerate(rounds) if _method(r) is method]
        if not indices:
            continue
        rows = np.concatenate([np.arange(ends[i] - len(rounds[i].tree), ends[i]) for i in indices])
        scores = scores_TV if len(indices) == len(rounds) else scores_TV[rows]
        decided.update(zip(indices, method([rounds[i] for i in indices], scores, law or forest_law), strict=True))
    return [decided[i] for i in range(len(rounds))]


def _method(r: Proposal) -> Callable[[Sequence[Proposal], torch.Tensor, LawFunction], list[Decision]]:
    if r.rule is not Rule.MATCH:
        return _ratio_test if r.shared or len(r.tree) > 1 else _without_tree
    return _match_greedy if r.sampling.greedy else _match_sampled


def _match_greedy(rounds: Sequence[Proposal], scores_TV: torch.Tensor, _: LawFunction) -> list[Decision]:
    return _matched(rounds, greedy_choice(scores_TV))


def _match_sampled(rounds: Sequence[Proposal], scores_TV: torch.Tensor, _: LawFunction) -> list[Decision]:
    """argmax log p + g with noise keyed by (seed, absolute position): the same token whatever the tree or the drafter."""
    probs_TV = distributions(scores_TV, [r.sampling for r in rounds for _ in range(len(r.tree))])
    at: list[At] = []
    noise_of: list[Ints] = []  # index into `at`: nodes of one depth share the noise of their position
    for r in rounds:
        noise_of.append(len(at) + r.tree.depth)
        at += [(r.key, 0, r.length + d) for d in range(int(r.tree.depth.max()) + 1)]
    return _matched(rounds, noisy_choice(probs_TV, Role.TARGET, at, np.concatenate(noise_of)))


def _matched(rounds: Sequence[Proposal], choice_T: Ints) -> list[Decision]:
    ends = accumulate(len(r.tree) for r in rounds)
    return [Decision(*match(r.tree, choice_T[end - len(r.tree) : end])) for r, end in zip(rounds, ends, strict=True)]


def _without_tree(rounds: Sequence[Proposal], scores_TV: torch.Tensor, _: LawFunction) -> list[Decision]:
    """Rounds without a tree: the same bits as `_ratio_test`, in a third of the time."""
    probs_BV = distributions(scores_TV, [r.sampling for r in rounds])
    coins = np.array([bonus_coin(r.key, r.epoch, r.length) for r in rounds])
    tokens = inverse_rows(probs_BV, coins)
    _require_mass(tokens + 1)
    return [Decision(stop=0, bonus=token) for token in tokens.tolist()]


def _ratio_test(rounds: Sequence[Proposal], scores_TV: torch.Tensor, law: LawFunction) -> list[Decision]:
    probs_TV = distributions(scores_TV, [r.sampling for r in rounds for _ in range(len(r.tree))])
    forest = Forest.of(
        [r.tree for r in rounds], [_algorithm(r) for r in rounds], [r.copies for r in rounds], _order(rounds)
    )
    atoms, weight = declared_rows(rounds)
    ids = gather_ids(forest, atoms)
    laws = law(forest, ids, weight, *gather(probs_TV, ids))
    stop = stop_nodes(laws, coins_of_nodes([(r.key, r.epoch, r.length) for r in rounds], forest.start))
    at = [(r.epoch, r.length + int(d)) for r, d in zip(rounds, forest.depth[stop], strict=True)]
    bonus = np.empty(len(rounds), dtype=np.int64)
    if own := [b for b, r in enumerate(rounds) if not r.shared]:
        bonus[own] = draw_bonus(probs_TV, laws, stop[own], [(rounds[b].key, *at[b]) for b in own])
    if shared := [b for b, r in enumerate(rounds) if r.shared]:
        keys = [rounds[b].key.bonus(rounds[b].length) for b in shared]
        noise = [(key, *at[b]) for key, b in zip(keys, shared, strict=True)]
        bonus[shared] = shared_bonus(probs_TV, laws, stop[shared], noise)
    columns = (stop - forest.start[:-1]).tolist(), bonus.tolist(), laws.draws()
    return [Decision(*values) for values in zip(*columns, strict=True)]


def _algorithm(r: Proposal) -> str:
    """The algorithm of a round. Under multi_step a local tree of chosen nodes is verified at token level."""
    return "token" if r.rule is Rule.MULTI_STEP and not r.tree.sampled[1:].all() else r.rule.value


def _order(rounds: Sequence[Proposal]) -> Floats | None:
    """float64[T]: the order in which siblings are tried under multi_step: coins of their own."""
    if all(r.rule is not Rule.MULTI_STEP for r in rounds):
        return None
    return coins_batch([(r.key, r.epoch, r.length, range(ORDER_IDS, ORDER_IDS + len(r.tree))) for r in rounds])


def declared_rows(rounds: Sequence[Proposal]) -> tuple[Ints, Ints]:
    """(ids int64[T, K], weight int64[T, K]) of the draft distributions of all nodes, padded with -1 and 0."""
    none = np.empty(0, np.int64), np.empty(0, np.int64)
    rows = [row or none for r in rounds for row in r.rows]
    size = np.array([len(row_ids) for row_ids, _ in rows])
    given = np.arange(size.max()) < size[:, None]
    ids, weight = np.full(given.shape, -1, dtype=np.int64), np.zeros(given.shape, dtype=np.int64)
    ids[given], weight[given] = (np.concatenate(column) for column in zip(*rows, strict=True))
    return ids, weight


# -- rows of the vocabulary ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def gather(probs_TV: torch.Tensor, ids_TG: Ints) -> tuple[Floats, Floats]:
    """(float64[T, G] mass at the given ids of each row, 0 where an id is -1; float64[T] mass of all other ids), per unit of the row's mass.

    The tail is summed over the complement: 1 − Σ would keep only the rounding errors of a small tail. probs_TV is changed on the way and
    restored.
    """
    vocab = int(probs_TV.shape[1])
    if int(ids_TG.max(initial=-1)) >= vocab:
        raise ValueError(f"ids: {int(ids_TG.max())} is outside [0, {vocab})")
    at, tail = np.zeros(ids_TG.shape), np.zeros(len(ids_TG))
    if host_can_read(probs_TV.device):
        kernels.gather(probs_TV.numpy(), np.ascontiguousarray(ids_TG), at, tail)
    else:
        present = ids_TG >= 0
        rows = np.nonzero(present)[0]
        flat = torch.from_numpy(rows * vocab + ids_TG[present]).to(probs_TV.device)
        values = probs_TV.view(-1)
        gathered = values[flat]
        values[flat] = 0.0
        tail_T = probs_TV.sum(-1, dtype=_widest(probs_TV.device))
        values[flat] = gathered
        both = torch.cat([gathered.to(tail_T.dtype), tail_T]).cpu().numpy().astype(np.float64)  # the host waits
        at[present], tail = both[: len(rows)], both[len(rows) :]
    kernels.normalise(at, tail)
    return at, tail


@torch.inference_mode()
def draw_bonus(probs_TV: torch.Tensor, law: ForestLaw, stop: Ints, at: Sequence[tuple[Key, int, int]]) -> Ints:
    """int64[B]: a token from the residual distribution of each stop node, by the bonus coin of each (key, epoch, position).

    The inverse distribution function runs over the gathered tokens first, so a row of the vocabulary is read only where the coin falls
    into the tail. Never a token without mass.
    """
    cumulative = np.cumsum(np.concatenate([np.zeros((len(stop), 1)), law.residual[stop]], axis=1), axis=1)
    inside, tail = cumulative[:, -1], law.tail[stop]
    whole = inside + tail
    _require_mass(whole)
    goal = np.array([bonus_coin(*place) for place in at]) * whole
    in_tail = (goal >= inside) & (tail > 0.0)
    token = np.empty(len(stop), dtype=np.int64)
    for b in np.flatnonzero(~in_tail):
        # u · total may round up to the total: then the first token that reaches it, which has mass.
        column = min(
            np.searchsorted(cumulative[b], goal[b], "right"), np.searchsorted(cumulative[b], inside[b], "left")
        )
        token[b] = law.ids[stop[b], column - 1]
    if in_tail.any():
        nodes = stop[in_tail]
        share = (goal[in_tail] - inside[in_tail]) / tail[in_tail]
        token[in_tail] = inverse_rows(probs_TV, share, nodes_B=nodes, excluded_BG=law.ids[nodes])
    return token


@torch.inference_mode()
def shared_bonus(probs_TV: torch.Tensor, law: ForestLaw, stop: Ints, at: Sequence[At]) -> Ints:
    """int64[B]: argmax of log r + b for the residual distribution r of each stop node and the bonus noise b of each (`Key.bonus`, epoch,
    position).

    Never a token without mass."""
    rows_BV = _residual_rows(probs_TV, law, stop)
    return noisy_choice(rows_BV, Role.BONUS, at, np.arange(len(stop)))


def _residual_rows(probs_TV: torch.Tensor, law: ForestLaw, stop: Ints) -> torch.Tensor:
    """[B, V]: the residual distributions of some nodes in double precision."""
    device = probs_TV.device
    scale = torch.from_numpy(law.tail_scale[stop]).to(device, _widest(device))[:, None]
    rows_BV = probs_TV[torch.from_numpy(stop).to(device)].to(_widest(device)) * scale
    _put(rows_BV, law.ids[stop], law.residual[stop])
    return rows_BV


def _put(rows_BV: torch.Tensor, ids_BG: Ints, mass_BG: Floats) -> None:
    """Replace the mass of these tokens of each row; an id of -1 is none."""
    present = ids_BG >= 0
    place = np.nonzero(present)[0] * rows_BV.shape[1] + ids_BG[present]
    mass = torch.from_numpy(mass_BG[present]).to(rows_BV.device, rows_BV.dtype)
    rows_BV.view(-1)[torch.from_numpy(place).to(rows_BV.device)] = mass


def inverse_rows(
    probs_TV: torch.Tensor, u_B: Floats, *, nodes_B: Ints | None = None, excluded_BG: Ints | None = None
) -> Ints:
    """int64[B]: the first token of a row whose cumulative mass exceeds the share u of the whole, u in [0, 1]; never one without mass, and
    -1 for a row that has none.

    nodes     numbers of the rows; None: each row once
    excluded  tokens whose mass does not count; -1 is none
    """
    nodes_B = np.arange(len(probs_TV)) if nodes_B is None else nodes_B
    excluded_BG = np.empty((len(nodes_B), 0), np.int64) if excluded_BG is None else excluded_BG
    token = np.empty(len(nodes_B), np.int64)
    if host_can_read(probs_TV.device):
        kernels.inverse_rows(probs_TV.numpy(), nodes_B, np.ascontiguousarray(excluded_BG), u_B, token)
        return token
    rows_BV = probs_TV[torch.from_numpy(nodes_B).to(probs_TV.device)].to(_widest(probs_TV.device))
    _put(rows_BV, excluded_BG, np.zeros(excluded_BG.shape))
    # Sums are in an order of the device's own: only tokens with mass may raise the running maximum.
    cumulative = torch.where(rows_BV > 0.0, rows_BV.cumsum(-1), 0.0).cummax(-1).values
    total = cumulative[:, -1:].contiguous()
    goal = torch.from_numpy(u_B).to(total)[:, None] * total
    # u · total may round up to the total: then the first token that reaches it, which has mass.
    first = torch.minimum(torch.searchsorted(cumulative, goal, right=True), torch.searchsorted(cumulative, total))
    token[:] = torch.where(total > 0.0, first, -1)[:, 0].cpu().numpy()
    return token


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _require_mass(mass_B: Floats | Ints) -> None:
    if not (mass_B > 0.0).all():  # NaN fails every comparison
        raise ValueError(
            f"target: residual distribution of mass {mass_B.min()} at a stop node; give rows that are laws"
        )


# -- on the host: the law of every round -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Forest:
    """Token trees one after another, and how each is verified. Node i of tree b is node start[b] + i of the forest.

    token, sampled  int64[T], bool[T]  as in `TokenTree`
    parent          int64[T]           number of the parent in the forest; -1 at a root
    depth           int64[T]           number of draft tokens on the path to each node
    start           int64[B + 1]       first node of each tree, and T
    turn            int64[T]           order in which nodes are tried: after their parents and earlier siblings
    budgets         bool[T]            the tree of the node is verified by traversal or block, whose STEPs pass a budget on
    copies          bool[T]            siblings in its tree are i.i.d. copies, each drawn from the whole row
    """

    algorithm: tuple[str, ...]
    token: Ints
    parent: Ints
    sampled: Bools
    depth: Ints
    start: Ints
    turn: Ints
    budgets: Bools
    copies: Bools

    @staticmethod
    def of(
        trees: Sequence[TokenTree],
        algorithm: Sequence[str],
        copies: Sequence[bool] | None = None,
        order: Floats | None = None,
    ) -> Forest:
        """The forest of some trees, at least one, each with its algorithm.

        copies  by tree; multi_step implies it. Default: children are drawn without replacement
        order   uniforms by node, used under multi_step only, where siblings are tried in random order
        """
        if not trees:
            raise ValueError("trees: none; give at least one")
        unknown = set(algorithm) - set(ALGORITHMS)
        if unknown:
            raise ValueError(f"algorithm: {min(unknown)!r}; choose from {', '.join(ALGORITHMS)}")
        for b, (tree, name) in enumerate(zip(trees, algorithm, strict=True)):
            if name == "multi_step" and not tree.sampled[1:].all():
                raise ValueError(f"sampled: tree {b} has a chosen node; multi_step needs children that are all drawn")
        size = np.array([len(tree) for tree in trees])
        start = np.concatenate([[0], np.cumsum(size)])
        parent = np.concatenate([tree.parent for tree in trees])
        depth = np.concatenate([tree.depth for tree in trees])
        turn = np.arange(len(parent))
        random = np.repeat([name == "multi_step" for name in algorithm], size)
        if random.any():
            if order is None:
                raise ValueError("order: None; multi_step needs one uniform per node for the order of siblings")
            turn = np.lexsort((np.where(random, order, 0.0), depth))
        return Forest(
            algorithm=tuple(algorithm),
            token=np.concatenate([tree.token for tree in trees]),
            parent=np.where(parent < 0, -1, parent + np.repeat(start[:-1], size)),
            sampled=np.concatenate([tree.sampled for tree in trees]),
            depth=depth,
            start=start,
            turn=turn,
            budgets=np.repeat([name in ("traversal", "block") for name in algorithm], size),
            copies=random | np.repeat(copies if copies is not None else [False] * len(trees), size),
        )

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    def name(self, node: int) -> str:
        """A node in words, for messages."""
        tree = int(np.searchsorted(self.start, node, side="right")) - 1
        return f"node {node - self.start[tree]} of tree {tree}"


@dataclass(frozen=True, eq=False)
class ForestLaw:
    """`VerificationLaw` of every tree of a forest without a vocabulary: the residual distribution of a node is `residual` on `ids` and
    tail_scale · p elsewhere. Under multi_step: given the order of the siblings.

    stop, entry, budget  float64[T]     as in `VerificationLaw`; stop sums to 1 over each tree
    ids                  int64[T, G]    gathered tokens, -1 where there is none
    residual             float64[T, G]  mass of the residual distribution at ids
    tail                 float64[T]     mass of the residual distribution elsewhere
    tail_scale           float64[T]     multiplier of the target's mass elsewhere
    column               int64[T]       column of the node's token in its parent's row; 0 at roots
    drawn_from, offered  float64[T, G]  the distribution that each child was drawn from, and budget times target at its turn, on the ids of
                                        its parent; at roots 0
    """

    forest: Forest
    stop: Floats
    entry: Floats
    budget: Floats
    ids: Ints
    residual: Floats
    tail: Floats
    tail_scale: Floats
    column: Ints
    drawn_from: Floats
    offered: Floats

    def draws(self) -> list[Draws]:
        """The children of each tree that were drawn, as the audit of drafters takes them."""
        child = np.flatnonzero(self.forest.sampled & (self.forest.parent >= 0))  # node numbers are draw order
        arrays = self.ids[self.forest.parent[child]], self.drawn_from[child], self.offered[child], self.column[child]
        ends = np.searchsorted(child, self.forest.start[1:-1])
        return [Draws(*columns) for columns in zip(*(np.split(array, ends) for array in arrays), strict=True)]


LawFunction = Callable[[Forest, Ints, Ints, Floats, Floats], ForestLaw]  # the signature of `forest_law`


def gather_ids(forest: Forest, atoms: ArrayLike) -> Ints:
    """int64[T, G]: the tokens of each row whose target mass a verification needs; -1 where there is none.

    atoms int64[T, K]: support of each draft row, -1 pad. Columns 0..K-1 repeat it; the others are tokens of chosen children outside it.
    """
    support = np.asarray(atoms, dtype=np.int64)
    if support.ndim != 2 or len(support) != forest.num_nodes:
        shape = f"[{forest.num_nodes}, K]"
        raise ValueError(f"atoms: shape {support.shape}; give K per node, {shape}, -1 where there is none")
    chosen = np.flatnonzero(~forest.sampled & (forest.parent >= 0))
    if not len(chosen):
        return support
    outside = chosen[~(support[forest.parent[chosen]] == forest.token[chosen, None]).any(axis=1)]
    if not len(outside):
        return support
    # Copies name a token twice.
    node, token = np.unique(np.stack([forest.parent[outside], forest.token[outside]]), axis=1)
    place = np.arange(len(node)) - np.searchsorted(node, node)  # among the tokens that its parent's row lacks
    more = np.full((forest.num_nodes, int(place.max()) + 1), -1, dtype=np.int64)
    more[node, place] = token
    return np.concatenate([support, more], axis=1)


def forest_law(forest: Forest, ids: ArrayLike, weight: ArrayLike, target_at: ArrayLike, tail: ArrayLike) -> ForestLaw:
    """The law of one round of every tree.

    ids       int64[T, G]    from `gather_ids`
    weight    int[T, K]      integer weights of the atoms ids[:, :K]; all zero where nothing was drawn
    target_at float64[T, G]  target mass at ids (anything where ids is -1)
    tail      float64[T]     target mass outside ids
    """
    num = forest.num_nodes
    ids, weight = np.ascontiguousarray(ids, dtype=np.int64), np.asarray(weight)
    target_at, whole_tail = np.asarray(target_at, dtype=np.float64), np.asarray(tail, dtype=np.float64)
    if ids.ndim != 2 or len(ids) != num:
        raise ValueError(f"ids: shape {ids.shape}; give the gathered tokens, [{num}, G], -1 where there is none")
    if weight.ndim != 2 or len(weight) != num or weight.shape[1] > ids.shape[1]:
        raise ValueError(
            f"weight: shape {weight.shape}; give the weights of the atoms, [{num}, K] with K <= {ids.shape[1]}"
        )
    if target_at.shape != ids.shape or whole_tail.shape != (num,):
        shapes = f"{ids.shape}, {target_at.shape}, {whole_tail.shape}"
        raise ValueError(f"ids, target_at, tail: shapes {shapes}; give [{num}, G], [{num}, G], [{num}]")
    left = np.zeros(ids.shape)
    left[:, : weight.shape[1]] = weight
    residual, rest = np.where(ids < 0, 0.0, target_at), whole_tail.copy()
    column = np.empty(num, dtype=np.int64)
    fault, node = kernels.check(
        forest.parent, forest.token, forest.sampled, forest.copies, ids, left, residual, rest, TOLERANCE, column
    )
    if fault != kernels.OK:
        raise ValueError(_fault(forest, fault, node, float(residual[node].sum() + rest[node])))
    stop, entry, budget, drawn_from, offered = kernels.ratio_tests(
        forest.parent, forest.turn, forest.sampled, forest.budgets, forest.copies, column, left, residual, rest
    )
    return ForestLaw(
        forest=forest,
        stop=stop,
        entry=entry,
        budget=budget,
        ids=ids,
        residual=residual,
        tail=rest,
        tail_scale=np.divide(rest, whole_tail, out=np.zeros(num), where=whole_tail > 0.0),
        column=column,
        drawn_from=drawn_from,
        offered=offered,
    )


def _fault(forest: Forest, fault: int, node: int, mass: float) -> str:
    """The message for a fault that a kernel found at a node."""
    name, token = forest.name(node), forest.token[node]
    return {
        kernels.BAD_WEIGHT: "weight: negative, not finite, or given where ids is -1; give the weights of the atoms",
        kernels.REPEATED_ID: "ids: a row names a token twice; give each atom once",
        kernels.BAD_TARGET: f"target_at, tail: row {node}, {name}, sums to {mass}; give the target law at ids and its rest",
        kernels.NO_COLUMN: f"ids: no token {token} in the row of {name}'s parent; use gather_ids(forest, atoms)",
        kernels.REPEATED_CHILD: f"token: siblings below {name} repeat a token; drawn children are without replacement",
        kernels.NO_WEIGHT: f"weight: none for token {token} of {name}; send the row the child was drawn from",
    }[fault]


def stop_nodes(law: ForestLaw, coins: ArrayLike) -> Ints:
    """int64[B]: the node of the forest where each round stops.

    coins float64[T] in [0, 1), one per node; those of the roots are not used.
    """
    u, forest = np.ascontiguousarray(coins, dtype=np.float64), law.forest
    if u.shape != (forest.num_nodes,):
        raise ValueError(f"coins: shape {u.shape}; give one per node, {forest.num_nodes}")
    stop: Ints = kernels.stop_nodes(forest.parent, forest.turn, forest.budgets, law.entry, law.budget, u)
    return stop[forest.start[:-1]]
