"""Best-first trees of a draft head, with compiled code between its forwards.

`grower.Grower` grows any tree with any draft model. What it does between two forwards is Python that has left the caches while the target
ran, a third of the time that a small head takes (docs/log.md, lesson 36). This module grows the trees of `BestFirst` alone, drawn, GREEDY
or chosen, from a head on a CPU, by the same rules: `rootward.core.growth` makes the same trees of the same rows and random words
(tests/unit/engine/test_head_growth.py). So rule L1 of algorithms.md 6.1 holds as it does there: the place of the next child is chosen by
ranks and depths before the child is drawn, except in chosen trees, whose nodes are not drawn.

Legend: B trees, N rows of a forward, M nodes of a tree with its root, K atoms, E hidden size of the head.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.distribution import LARGEST, DraftDistribution
from rootward.core.frames import Open
from rootward.core.growth import BestFirst, strategy_of
from rootward.core.growth.strategies import Place
from rootward.core.living_tree import Snapshot
from rootward.core.requests import DraftMode, Sampling
from rootward.core.rng import Key, Role
from rootward.core.tree import TokenTree
from rootward.engine.atoms import MOST_SORTED_ATOMS, atoms_of
from rootward.engine.batch import Step
from rootward.engine.cpu_kernels import VisibleKeys
from rootward.engine.grower import draft_sampling
from rootward.engine.head_model import HeadModel
from rootward.engine.verify_kernels import exact, words_of_block
from rootward.ports import DraftModel, Reduction, TreeToGrow

Features = NDArray[np.float32]
MODES = (DraftMode.SAMPLED, DraftMode.GREEDY, DraftMode.TOP_K)
CHOSEN = MODES.index(DraftMode.TOP_K)
ROWS_OF_PART = 4  # rows that attention reads keys for together
SMALLEST = sys.float_info.min  # of a chance, as in `BestFirst.score`
UNLIMITED = 1 << 40  # positions
MOST_EOS = 64  # tokens that end the text: each node is compared with those of all trees
NOTHING = DraftDistribution(np.empty(0, np.int64), np.empty(0, np.int64))


class Texts(NamedTuple):
    """The text that the head reads first: of tree b the rows start[b] to start[b + 1], behind length[b] positions."""

    ids: Any  # int64[N]
    features: Any  # float32[N, E]
    start: Any  # int64[B + 1]
    length: Any  # int64[B]
    blocks: Any  # int64[B, ·]: the block table
    block_size: int
    window: int  # positions that a row sees, its own included


class Limits(NamedTuple):
    """Limits of the trees."""

    nodes: Any  # int64[B], as all but the last three: most nodes
    draws: Any  # most children made after each forward
    depth: Any  # nodes of this depth have no children
    topk: Any  # most children of a node
    atoms: Any  # most atoms of a row
    mode: Any  # index of `MODES`
    family: Any  # children of the root that are one event (algorithms.md 5.7)
    key: Any  # uint64[B], as the next one
    draw_number: Any
    eos: Any  # int64[B, ·], padded with -1


class Scores(NamedTuple):
    """Log-probabilities, as `BestFirst.score` says."""

    accepted: float  # of a first child
    later: float
    failed_first: float
    failed_later: float
    family: Any  # float64[·]


class Trees(NamedTuple):
    """The result. Node 0 is the root; the others are in draw order."""

    size: Any  # int64[B]: nodes, the root included
    num_draws: Any  # int64[B]: draws so far
    token: Any  # int64[B, M], as the next ones
    parent: Any
    depth: Any
    rank: Any  # children so far; -1: the node has no row
    support: Any  # atoms of its row
    mass: Any  # sum of `left`
    sampled: Any  # bool[B, M]
    score: Any  # float64[B, M]
    at_rest: Any  # bool[B]: no further node will be made
    ids: Any  # int64[B, M, K]: the atoms of its row
    weight: Any  # int64[B, M, K]: their integer weights, 0 where there is no atom
    left: Any  # int64[B, M, K]: without those of drawn children
    feature: Any  # float32[B, M, E]: for its children


# Sums of scores are in the order of `core.growth`. Not `fastmath`, neither here nor in the kernel, whose flags hold for inlined functions.
exactly = numba.njit(nogil=True, error_model="numpy", forceinline=True)
kernel = numba.njit(**exact)


@exactly
def _score(b, v, limits, scores, trees):
    """Of the next child of a node, and whether it may have one."""
    rank = trees.rank[b, v]
    if rank < 0 or rank >= limits.topk[b]:
        return 0.0, False
    if limits.mode[b] == CHOSEN:
        if rank >= trees.support[b, v]:
            return 0.0, False
        chance = trees.weight[b, v, rank] / trees.mass[b, v]
        return trees.score[b, v] + math.log(max(chance, SMALLEST)), True
    if trees.mass[b, v] == 0:
        return 0.0, False
    if rank == 0:
        return trees.score[b, v] + scores.accepted, True
    return trees.score[b, v] + (scores.failed_first + (rank - 1) * scores.failed_later) + scores.later, True


@exactly
def _below(bound, word):
    """(`distribution.below` of one word, whether it is rejected): the high half of word · bound, for a bound below 2^32."""
    bound, half = np.uint64(bound), np.uint64(32)
    low = (word & np.uint64(0xFFFFFFFF)) * bound
    high = (word >> half) * bound
    product = (high << half) + low
    rejected = (np.uint64(0xFFFFFFFFFFFFFFFF) % bound + np.uint64(1)) % bound
    return (high + (low >> half)) >> half, product < rejected


@exactly
def _drawn(b, v, limits, trees):
    """The index of an atom of a node's row drawn by one of two new words, which is taken out; -1 if both are rejected, which hardly ever
    happens."""
    first, second = words_of_block(trees.num_draws[b], limits.key[b], limits.draw_number[b])
    trees.num_draws[b] += 1
    number, rejected = _below(trees.mass[b, v], first)
    if rejected:
        number, rejected = _below(trees.mass[b, v], second)
    if rejected:
        return -1
    i, cumulative = 0, np.uint64(trees.left[b, v, 0])
    while cumulative <= number:
        i += 1
        cumulative += np.uint64(trees.left[b, v, i])
    trees.mass[b, v] -= trees.left[b, v, i]
    trees.left[b, v, i] = 0
    return i


@exactly
def _attach(b, parent, token, sampled, score, trees):
    child = trees.size[b]
    trees.size[b] += 1
    trees.token[b, child], trees.parent[b, child], trees.sampled[b, child] = token, parent, sampled
    trees.depth[b, child], trees.rank[b, child], trees.score[b, child] = trees.depth[b, parent] + 1, -1, score


@exactly
def _draw_family(b, limits, scores, trees):
    """`distribution.greedy_family` of the root. Returns the number of its children."""
    num_chosen = min(limits.family[b] - 1, limits.nodes[b] - trees.size[b], trees.support[b, 0])
    for i in range(num_chosen):
        trees.mass[b, 0] -= trees.left[b, 0, i]
        trees.left[b, 0, i] = 0
    made = 0
    if trees.mass[b, 0] > 0:
        i = _drawn(b, 0, limits, trees)
        if i >= 0:
            _attach(b, 0, trees.ids[b, 0, i], True, scores.family[0], trees)
            made = 1
    else:
        trees.num_draws[b] += 1  # `core.growth` takes words for it all the same
    for i in range(num_chosen):
        _attach(b, 0, trees.ids[b, 0, i], False, scores.family[made + i], trees)
    trees.rank[b, 0] = limits.topk[b]  # no further children
    return made + num_chosen


@exactly
def _draw_level(b, limits, scores, trees):
    """Make the children of a level (`Growth.draw`)."""
    drawn = 0
    while drawn < limits.draws[b] and trees.size[b] <= limits.nodes[b]:
        best, node = -np.inf, -1
        for v in range(trees.size[b]):  # of equal scores the first one
            score, may = _score(b, v, limits, scores, trees)
            if may and score > best:
                best, node = score, v
        if node < 0:
            break
        if limits.family[b] and node == 0:
            drawn += _draw_family(b, limits, scores, trees)
            continue
        is_drawn = limits.mode[b] != CHOSEN
        i = _drawn(b, node, limits, trees) if is_drawn else trees.rank[b, node]
        if i < 0:
            break
        _attach(b, node, trees.ids[b, node, i], is_drawn, best, trees)
        trees.rank[b, node] += 1
        drawn += 1


@exactly
def _may_have_children(b, v, limits, trees):
    may = trees.depth[b, v] < limits.depth[b]
    for i in range(limits.eos.shape[1]):  # expressions on arrays take seconds to compile, here and below
        may = may and limits.eos[b, i] != trees.token[b, v]
    return may


@exactly
def _set_row(b, v, packed, limits, trees):
    """The row of a node: its atoms as `likeliest` has packed them."""
    trees.rank[b, v] = 0
    for i in range(min(len(packed), limits.atoms[b])):
        weight = LARGEST - (packed[i] >> 32)
        if weight == 0:
            break
        trees.ids[b, v, i], trees.weight[b, v, i], trees.left[b, v, i] = packed[i] & 0xFFFFFFFF, weight, weight
        trees.support[b, v] = i + 1
        trees.mass[b, v] += weight


@exactly
def _cell(texts, b, at):
    """Cell of the storage of a cell of a session."""
    return texts.blocks[b, at // texts.block_size] * texts.block_size + at % texts.block_size


@kernel
def rows_of_text(texts: Texts, last_position: int) -> tuple[Any, Any, VisibleKeys]:
    """(positions and cells of the rows, what they see): rows of a part see those of the parts before them as committed text."""
    num_rows, num_trees, num_parts = len(texts.ids), len(texts.length), 0
    for b in range(num_trees):
        num_parts += (texts.start[b + 1] - texts.start[b] + ROWS_OF_PART - 1) // ROWS_OF_PART
    positions, cells, first = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    part_start, length = np.empty(num_parts + 1, np.int64), np.empty(num_parts, np.int64)
    entry = np.empty(num_parts, np.int64)
    blocks = np.empty((num_parts, texts.blocks.shape[1]), np.int64)
    node_start, nodes = np.zeros(num_rows + 1, np.int64), np.empty(ROWS_OF_PART * num_rows, np.int64)
    part = num_nodes = 0
    for b in range(num_trees):
        for n in range(texts.start[b], texts.start[b + 1]):
            i = n - texts.start[b]
            at = texts.length[b] + i
            positions[n], cells[n] = min(at, last_position), _cell(texts, b, at)
            first[n] = max(at - texts.window + 1, 0)
            if i % ROWS_OF_PART == 0:
                entry[part], part_start[part], length[part] = part, n, at
                for j in range(blocks.shape[1]):
                    blocks[part, j] = texts.blocks[b, j]
                part += 1
            for before in range(n - i % ROWS_OF_PART, n + 1):
                nodes[num_nodes] = cells[before]
                num_nodes += 1
            node_start[n + 1] = num_nodes
    part_start[num_parts] = num_rows
    seen = VisibleKeys(entry, part_start, first, length, blocks, texts.block_size, node_start, nodes[:num_nodes])
    return positions, cells, seen


@exactly
def _rows_of_level(num_rows, texts, last_position, limits, trees):
    """(tree, node, position and cell of each row of the next level, what they see): nodes without a row that may have children."""
    num_trees, length = len(texts.length), np.empty(len(texts.length), np.int64)
    for b in range(num_trees):
        length[b] = texts.length[b] + texts.start[b + 1] - texts.start[b]
    of_tree, node = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    positions, cells, first = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    part_entry, part_start = np.empty(num_rows, np.int64), np.empty(num_rows + 1, np.int64)
    node_start, nodes = np.zeros(num_rows + 1, np.int64), np.empty(num_rows * trees.depth.shape[1], np.int64)
    n = part = 0
    for b in range(num_trees):
        if trees.size[b] > limits.nodes[b]:
            continue
        of_part = 0
        for v in range(1, trees.size[b]):
            if trees.rank[b, v] >= 0 or not _may_have_children(b, v, limits, trees):
                continue
            depth = trees.depth[b, v]
            at = length[b] - 1 + depth
            of_tree[n], node[n], positions[n] = b, v, min(at, last_position)
            cells[n], first[n] = _cell(texts, b, length[b] - 1 + v), max(at - texts.window + 1, 0)
            above, end = v, node_start[n] + depth
            for i in range(depth):
                nodes[end - 1 - i] = _cell(texts, b, length[b] - 1 + above)
                above = trees.parent[b, above]
            node_start[n + 1] = end
            if of_part % ROWS_OF_PART == 0:
                part_entry[part], part_start[part] = b, n
                part += 1
            of_part += 1
            n += 1
    part_start[part] = num_rows
    seen = VisibleKeys(
        part_entry[:part],
        part_start[: part + 1],
        first,
        length,
        texts.blocks,
        texts.block_size,
        node_start,
        nodes[: node_start[num_rows]],
    )
    return of_tree, node, positions, cells, seen


@exactly
def _work_left(limits, scores, trees):
    """Rows of the next level, after which it is known which trees are at rest."""
    num_rows = 0
    for b in range(len(limits.nodes)):
        trees.at_rest[b] = True
        if trees.size[b] > limits.nodes[b]:
            continue
        for v in range(trees.size[b]):
            if trees.rank[b, v] < 0:
                is_row = v > 0 and _may_have_children(b, v, limits, trees)
                num_rows += is_row
                trees.at_rest[b] = trees.at_rest[b] and not is_row
            elif _score(b, v, limits, scores, trees)[1]:
                trees.at_rest[b] = False
    return num_rows


@kernel
def next_level(
    of_tree: Any,
    node: Any,
    packed: Any,
    passed_on: Any,
    last_position: int,
    texts: Texts,
    limits: Limits,
    scores: Scores,
    trees: Trees,
) -> tuple[Any, Any, Any, Any, Any, Any, VisibleKeys]:
    """Give nodes the rows of a forward, draw the children of a level, and name the rows of the next forward.

    of_tree, node int64[N]: of each row; packed int64[N, K]: its atoms; passed_on float32[N, E]: what its children read.
    Returns the same of the next rows: (of_tree, node, ids, features, positions, cells, what they see)."""
    for n in range(len(node)):
        b, v = of_tree[n], node[n]
        if v > 0 or _may_have_children(b, v, limits, trees):
            _set_row(b, v, packed[n], limits, trees)
        for e in range(passed_on.shape[1]):
            trees.feature[b, v, e] = passed_on[n, e]
    for b in range(len(limits.nodes)):
        _draw_level(b, limits, scores, trees)
    num_rows = _work_left(limits, scores, trees)
    of_tree, node, positions, cells, seen = _rows_of_level(num_rows, texts, last_position, limits, trees)
    ids, features = np.empty(num_rows, np.int64), np.empty((num_rows, passed_on.shape[1]), np.float32)
    for n in range(num_rows):
        b, v = of_tree[n], node[n]
        ids[n], above = trees.token[b, v], trees.parent[b, v]
        for e in range(passed_on.shape[1]):
            features[n, e] = trees.feature[b, above, e]
    return of_tree, node, ids, features, positions, cells, seen


# -- for callers in Python ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReadText:
    """The text of a session as the head has read it: `length` tokens, the last ones of them in its slot."""

    slot: int
    length: int
    strategy: BestFirst
    sampling: Sampling  # of the draft distributions
    key: int


def compiled_trees(model: DraftModel, *, incarnation: int, best_first: BestFirst) -> HeadTrees | None:
    """None: the model is no head that is computed by kernels, or no autoregressive one."""
    if not isinstance(model, HeadModel) or not model.head.has_kernels or (model.window or UNLIMITED) < ROWS_OF_PART:
        return None
    return HeadTrees(model, incarnation=incarnation, best_first=best_first)


def compile_growth(model: DraftModel) -> None:
    """Compile what trees of this head need, if it has not been on this machine, which takes seconds. On the thread that loads the model:
    the event loop goes on, and no other thread begins to compute."""
    if (trees := compiled_trees(model, incarnation=0, best_first=BestFirst())) is not None:
        trees.compile()


class LevelStep(Step):
    """A step whose arrays are given."""

    def __init__(self, ids: Any, positions: Any, cells: Any, seen: VisibleKeys, wanted: Any):
        self.ids, self.positions, self.write = (torch.from_numpy(array) for array in (ids, positions, cells))
        self.wanted = None if wanted is None else torch.from_numpy(wanted)
        self._seen = seen

    def visible(self, window: int | None) -> VisibleKeys:
        return self._seen


class TreeBatch:
    """Trees that grow together, a forward of the head for each level. The first one reads their texts.

    wanted, texts: the trees, and what of their texts the head has read before; kind, table: of the reduction of rows (`atoms.atoms_of`)."""

    def __init__(
        self,
        model: HeadModel,
        wanted: Sequence[TreeToGrow],
        texts: Sequence[ReadText],
        *,
        inputs: Texts,
        limits: Limits,
        scores: Scores,
        trees: Trees,
        kind: Any,
        table: Any,
    ) -> None:
        self.wanted, self.texts, self.trees = wanted, texts, trees
        self._model, self._inputs, self._limits, self._scores = model, inputs, limits, scores
        self._kind, self._table, self._last_position = kind, table, model.info.max_positions - 1
        positions, cells, seen = rows_of_text(inputs, self._last_position)
        of_tree, node = np.arange(len(wanted)), np.zeros(len(wanted), np.int64)
        self._rows: tuple[Any, ...] = of_tree, node, inputs.ids, inputs.features, positions, cells, seen
        self._kept: Any = inputs.start[1:] - 1  # rows of this forward whose logits are wanted
        self.num_tokens: list[int] = np.diff(inputs.start).tolist()  # of each text that are read

    @property
    def done(self) -> bool:
        """No tree will get another node."""
        return bool(self.trees.at_rest.all())

    @property
    def num_rows(self) -> int:
        """Rows of the next forward."""
        return len(self._rows[2])

    def level(self) -> None:
        """A forward, and the children of a level. No forward if no node needs a row: then further children of others are drawn. They are a
        level of their own, so that no node waits for another one because of the tokens of both."""
        of_tree, node, ids, features, positions, cells, seen = self._rows
        if len(ids):
            step = LevelStep(ids, positions, cells, seen, self._kept if len(self._kept) < len(ids) else None)
            packed, passed_on = self._model.expanded(
                step, features, Reduction(self._kind, self._kind.reduce, self._table[of_tree])
            )
            passed_on = passed_on if step.wanted is None else passed_on[self._kept]
        else:
            packed, passed_on = np.empty((0, self._kind.num_atoms), np.int64), features
        own = self._last_position, self._inputs, self._limits, self._scores, self.trees
        self._rows = next_level(of_tree, node, packed, passed_on, *own)
        self._kept = self._rows[2]

    def give_up(self, b: int) -> None:
        """Make no more nodes of a tree. Its rows of the next forward, which are fixed, are computed all the same."""
        self._limits.nodes[b] = 0

    def declared(self, b: int, node: int) -> tuple[Any, Any] | None:
        """(ids, weights int64[k]): the distribution that the drawn children of a node come from. None: there are none."""
        trees = self.trees
        # A family draws from what it does not choose.
        first = 0 if node else int((~trees.sampled[b, 1 : trees.size[b]]).sum())
        end = int(trees.support[b, node])
        return (trees.ids[b, node, first:end], trees.weight[b, node, first:end]) if first < end else None

    def snapshot(self, b: int) -> Snapshot:
        """The tree as it is."""
        trees, size = self.trees, int(self.trees.size[b])
        is_drawn = self.wanted[b].opening.law.ratio
        tree = TokenTree(trees.token[b, :size], trees.parent[b, :size], trees.sampled[b, :size])
        rows = tuple(self.declared(b, node) if is_drawn else None for node in range(size))
        return Snapshot(tree, tuple(range(size)), rows)


class HeadTrees:
    """Trees of sessions by `next_level`. best_first: settings of their growth. incarnation: see `Grower`."""

    def __init__(self, model: HeadModel, *, incarnation: int, best_first: BestFirst):
        self._model, self._incarnation, self._best_first = model, incarnation, best_first
        self._scores = Scores(
            accepted=math.log(best_first.acceptance),
            later=math.log(best_first.later),
            failed_first=math.log1p(-best_first.acceptance),
            failed_later=math.log1p(-best_first.later),
            # To the last bit, by the library's logarithm: scores may be equal.
            family=np.array([math.log(mass) for mass in best_first.root_family]),
        )
        self.num_slots = model.size.num_slots
        self._texts: dict[Hashable, ReadText] = {}
        self._draw_number = 0

    def takes(self, session: Hashable, opening: Open) -> bool:
        """Whether trees of this session are grown here."""
        if session in self._texts:
            return True
        sampling, ids = opening.sampling, self._model.head.output.ids
        vocab = self._model.vocab_size if ids is None else len(ids)
        if opening.law not in MODES or not isinstance(self._strategy(opening), BestFirst):
            return False
        plain = not (sampling.penalised or sampling.shifted or sampling.min_p or sampling.top_k or sampling.top_p < 1.0)
        atoms = opening.num_atoms <= min(MOST_SORTED_ATOMS, vocab - 1)
        near = opening.max_depth < (self._model.window or UNLIMITED)  # a node sees its whole path
        few_ends = len(opening.eos_ids) <= MOST_EOS
        return plain and atoms and near and few_ends and not opening.prediction

    def forget(self, session: Hashable) -> None:
        if (text := self._texts.pop(session, None)) is not None:
            self._model.close(text.slot)

    def grow(self, wanted: Sequence[tuple[TreeToGrow, Features]]) -> dict[Hashable, Snapshot]:
        """A tree for each session; none where the text fills the context, or no slot is free. Features: of the positions before each of
        the last n tokens of the text, float32[n, E]."""
        batch = self.start(wanted)
        if batch is None:
            return {}
        while not batch.done:
            batch.level()
        self.finish(batch)
        return {one.session: batch.snapshot(b) for b, one in enumerate(batch.wanted)}

    def start(self, wanted: Sequence[tuple[TreeToGrow, Features]]) -> TreeBatch | None:
        """The trees that `grow` would return, before the first forward; None: there are none. Until `finish` no other batch may have one of
        their sessions, and none of these may be forgotten."""
        ready = [(one, features) for one, features in wanted if self._has_slot(one, len(features))]
        if not ready:
            return None
        model, trees = self._model, [one for one, _ in ready]
        own = [self._texts[one.session] for one in trees]
        tokens = [one.text[text.length :] for one, text in zip(trees, own, strict=True)]
        start = np.cumsum([0, *map(len, tokens)])
        for one, text, new in zip(trees, own, tokens, strict=True):
            model.reserve(text.slot, len(new) + one.nodes)
        limits, kind, table = self._limits(trees, own)
        return TreeBatch(
            model,
            trees,
            own,
            inputs=self._inputs(own, tokens, start, [features for _, features in ready]),
            limits=limits,
            scores=self._scores,
            trees=self._roots(trees),
            kind=kind,
            table=table,
        )

    def finish(self, batch: TreeBatch) -> None:
        """Keep what the batch has read of its texts, and none of its nodes. After one level at least."""
        for text, num_tokens in zip(batch.texts, batch.num_tokens, strict=True):
            self._model.append(text.slot, num_tokens)
            text.length += num_tokens

    def compile(self) -> None:
        """Grow a tree, which compiles what has not been."""
        tree = TreeToGrow(0, (0, 0), Open(0, 0, (), Sampling(), DraftMode.SAMPLED, 0, 0, 1, 1, 1, 1, (0,)), 1)
        if self.takes(tree.session, tree.opening):
            self.grow([(tree, np.zeros((1, self._model.feature_size), np.float32))])
            self.forget(tree.session)

    def _strategy(self, opening: Open) -> Any:
        settings = replace(self._best_first, max_depth=opening.max_depth, topk=opening.topk)
        return strategy_of(opening.strategy, opening.law, settings)

    def _has_slot(self, one: TreeToGrow, num_features: int) -> bool:
        if len(one.text) >= self._model.info.max_positions:
            return False
        if one.session not in self._texts:
            if self._model.num_free_slots == 0:
                return False
            read = len(one.text) - num_features
            key = Key(one.opening.seed, one.opening.choice).derive(Role.DRAW, self._incarnation)
            strategy, sampling = self._strategy(one.opening), draft_sampling(one.opening.sampling)
            self._texts[one.session] = ReadText(self._model.open(), read, strategy, sampling, key)
        return True

    def _roots(self, wanted: Sequence[TreeToGrow]) -> Trees:
        num_trees, most = len(wanted), 1 + max(one.nodes for one in wanted)
        num_atoms = max(one.opening.num_atoms for one in wanted)
        token, parent, depth, rank, support, mass = np.zeros((6, num_trees, most), np.int64)
        token[:, 0], parent[:, 0], rank[:] = [one.text[-1] for one in wanted], -1, -1
        rows = np.zeros((3, num_trees, most, num_atoms), np.int64)
        return Trees(
            size=np.ones(num_trees, np.int64),
            num_draws=np.zeros(num_trees, np.int64),
            token=token,
            parent=parent,
            depth=depth,
            rank=rank,
            support=support,
            mass=mass,
            sampled=np.zeros((num_trees, most), np.bool_),
            score=np.zeros((num_trees, most)),
            at_rest=np.zeros(num_trees, np.bool_),
            ids=rows[0],
            weight=rows[1],
            left=rows[2],
            feature=np.empty((num_trees, most, self._model.feature_size), np.float32),
        )

    def _limits(self, wanted: Sequence[TreeToGrow], own: Sequence[ReadText]) -> tuple[Limits, Any, Any]:
        """(the limits, kind and table of the reduction of their rows, `atoms.atoms_of`)."""
        last = self._model.info.max_positions - 1
        self._draw_number += len(wanted)
        eos = np.full((len(wanted), max(1, *(len(one.opening.eos_ids) for one in wanted))), -1)
        for b, one in enumerate(wanted):
            eos[b, : len(one.opening.eos_ids)] = one.opening.eos_ids
        root = Place(0, 0, 0.0, NOTHING)
        integers = []
        for one, text in zip(wanted, own, strict=True):
            nodes, strategy = min(one.nodes, one.opening.node_cap), text.strategy
            depth = min(strategy.max_depth, last - len(one.text))  # deeper tokens are outside of the context
            kind_of_tree = MODES.index(one.opening.law), len(strategy.family(root, nodes))
            integers.append((nodes, strategy.draws(nodes), depth, strategy.topk, one.opening.num_atoms, *kind_of_tree))
        columns = np.array(integers, np.int64).T.copy()
        numbers = self._draw_number - np.arange(len(wanted), dtype=np.uint64)
        most = max(one.opening.num_atoms for one in wanted)
        kind, reduction = atoms_of([text.sampling for text in own], self._model.vocab_size, most)
        keys = np.array([text.key for text in own], np.uint64)
        return Limits._make([*columns, keys, numbers, eos]), kind, reduction.table

    def _inputs(
        self, own: Sequence[ReadText], tokens: Sequence[Sequence[int]], start: Any, known: Sequence[Features]
    ) -> Texts:
        features = np.zeros((int(start[-1]), self._model.feature_size), np.float32)
        for rows, end, new in zip(known, start[1:], tokens, strict=True):
            num = min(len(new), len(rows))  # tokens whose features are missing have zeros
            features[end - num : end] = rows[len(rows) - num :]
        model = self._model
        tables = [model.session(text.slot).table.blocks for text in own]
        blocks = np.zeros((len(own), max(map(len, tables))), np.int64)
        for b, table in enumerate(tables):
            blocks[b, : len(table)] = table
        return Texts(
            ids=np.array([token for new in tokens for token in new], np.int64),
            features=features,
            start=start,
            length=np.array([model.length(text.slot) for text in own]),
            blocks=blocks,
            block_size=model.block_size,
            window=model.window or UNLIMITED,
        )
