"""What a rule makes of a tree: in closed form, and by verdicts drawn with fresh coins.

Trees and rows are in rank space (`ranked`). The closed form needs no coins: stop float64[N]. Under `coupled` the coins
are the shared noise itself; the closed form there is the expectation given the noise of the tree's own nodes.

Legend: N nodes, K atoms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.lockstep import Drafted
from benchmarks.ranked import Floats, RankedRows
from rootward.core import verification
from rootward.core.calibration import entry_masses
from rootward.core.law import VerificationLaw, inverse
from rootward.core.tree import TokenTree

RATIO_RULES = ("token", "multi_step", "block", "traversal")
RULES = (*RATIO_RULES, "match", "coupled")


class Outcome(NamedTuple):
    """What a rule makes of one tree.

    stop   float64[N]  the closed form: P(the round stops at a node | the tree)
    reach  float64[N]  P(the round stops in the subtree of a node), 1 at the root. Under traversal the draws below each
                       node are integrated out (`entry_masses`): the same mean over trees, less noise
    drawn  depths of the stop nodes of drawn verdicts
    """

    stop: Floats
    reach: Floats
    drawn: list[int]

    @property
    def tokens(self) -> float:
        """Expected tokens of the round, the bonus token included: 1 + the sum of reach below the root."""
        return float(self.reach.sum())


class Round(NamedTuple):
    """A tree with all its rows. target float64[N, K+1], draft float64[N, K+1]; leaves have all target mass on OTHER:
    what follows a leaf decides nothing about where the round stops."""

    tree: TokenTree
    target: Floats
    draft: Floats
    names: list[tuple[int, tuple[int, ...]]]  # (context, rank path) of each node


def rounds(rows: RankedRows, context: int, drafted: Drafted) -> Round:
    """The rows of one tree. Those of inner nodes are known: children were made from them."""
    tree, num = drafted.tree, rows.num_atoms
    target = np.zeros((len(tree), num + 1))
    target[:, num] = 1.0
    draft = np.zeros((len(tree), num + 1))
    draft[:, :num] = drafted.draft
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token.tolist()[1:], tree.parent.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    for node, family in enumerate(tree.children):
        if family:
            target[node] = rows.at(context, paths[node]).p
    return Round(tree, target, draft, [(context, path) for path in paths])


def outcome(rule: str, rows: RankedRows, one: Round, replacement: bool, coins: Coins, num: int) -> Outcome:
    """Closed form of a rule on a tree, and `num` verdicts (one under `coupled`: the tree has only its own noise)."""
    if rule == "match":
        stop, drawn = matching(one.tree, one.target), [_matched(one, coins) for _ in range(num)]
    elif rule == "coupled":
        stop, drawn = coupling(rows, one), [_coupled(rows, one)]
    else:
        law = verification.law(rule, one.tree, one.target, one.draft, replacement=replacement)
        stop, drawn = law.stop, [int(one.tree.depth[_stop(law, coins)]) for _ in range(num)]
        if rule in ("block", "traversal"):
            return Outcome(stop, entry_masses(law), drawn)
    return Outcome(stop, subtree(one.tree, stop), drawn)


def subtree(tree: TokenTree, mass: Floats) -> Floats:
    """float64[N]: the mass at each node and below it."""
    total = mass.copy()
    for node in range(len(tree) - 1, 0, -1):
        total[tree.parent[node]] += total[node]
    return total


def matching(tree: TokenTree, target: Floats) -> Floats:
    """stop float64[N] of target matching: the target's own token after a node is a child of it, or the round stops."""
    reach = np.zeros(len(tree))
    reach[0] = 1.0
    stop = reach.copy()
    for node, family in enumerate(tree.children):
        here, seen = 1.0, set()
        for child in family:
            token = int(tree.token[child])
            mass = 0.0 if token in seen else float(target[node, token])  # of equal siblings the first is taken
            seen.add(token)
            reach[child], here = reach[node] * mass, here - mass
        stop[node] = reach[node] * max(here, 0.0)
    return stop


def coupling(rows: RankedRows, one: Round) -> Floats:
    """stop float64[N] under shared noise, given the noise of all children.

    With E_x = exp(−g_x) the draft takes the smallest E_x/q_x and the target the smallest E_x/p_x. Of the tokens that
    are no children it is known that E_x > q_x·t, t the largest E/q of the children, and beyond that E_x is a fresh
    exponential. So the target's token is its best child c, of time s = E_c/p_c, with probability
    exp(−Σ_x [p_x·s − q_x·t]₊) over the x that are no children, and no other child ever.
    """
    tree = one.tree
    reach = np.zeros(len(tree))
    reach[0] = 1.0
    stop = reach.copy()
    for node, family in enumerate(tree.children):
        stop[node] = reach[node]
        if family and reach[node] > 0.0:
            best, hit = _hit(rows, one, node, family)
            reach[best] = reach[node] * hit
            stop[node] -= reach[best]
    return stop


def _hit(rows: RankedRows, one: Round, node: int, family: tuple[int, ...]) -> tuple[int, float]:
    """(the only child the target can take, the probability that it does)."""
    known, tokens = rows.at(*one.names[node]), one.tree.token[list(family)]
    time = np.exp(-known.noise[tokens].astype(np.float64))
    with np.errstate(divide="ignore"):
        soonest = time / known.p[tokens]
    best = int(soonest.argmin())
    if not np.isfinite(soonest[best]):
        return family[best], 0.0
    latest = float((time / known.q[tokens]).max())
    late = known.p * soonest[best]
    late[:-1] -= known.q * latest
    late[tokens] = 0.0
    return family[best], float(np.exp(-np.maximum(late, 0.0).sum()))


class Coins:
    """Fresh uniforms for drawn verdicts."""

    def __init__(self, *key: int) -> None:
        self._rng = np.random.default_rng([105, *key])

    def __call__(self, num: int) -> Floats:
        return self._rng.random(num)


def _stop(law: VerificationLaw, coins: Coins) -> int:
    """By the engine's decision rule where there is one; multi_step has a law only."""
    if law.algorithm == "multi_step":
        return inverse(law.stop, float(coins(1)[0]))
    return verification.stop_node(law, coins(len(law.tree)))


def _matched(one: Round, coins: Coins) -> int:
    """Depth of the stop node when the target draws its own token after every node."""
    cumulative = np.cumsum(one.target, axis=1)
    u = coins(len(one.tree))[:, None] * cumulative[:, -1:]
    choice = np.minimum((cumulative <= u).sum(axis=1), one.target.shape[1] - 1)
    return int(one.tree.depth[verification.match(one.tree, choice).stop])


def _coupled(rows: RankedRows, one: Round) -> int:
    """Depth of the stop node under the noise the tree was made with."""
    inner = [bool(family) for family in one.tree.children]
    choice = [rows.at(*name).choice if has else rows.num_atoms for name, has in zip(one.names, inner, strict=True)]
    return int(one.tree.depth[verification.match(one.tree, choice).stop])
