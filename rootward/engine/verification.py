"""The verdicts of a batch, decided where its rows are: `rootward.core.verification.batched` on a torch device.

`place` runs on the host, before or beside the forward pass: it lays a forest out in tables of a fixed `Shape`. `verify`
runs on the device and is a function of tensors: nothing comes back to the host on the way, and its loop runs over the
waves of the shape, a Python tuple. So it can be captured in a CUDA graph or compiled, once for all forests of a shape.

Rows of the tables keep the type of the laws (float32; float64 where the model computes in it); S, w, t, sums and coins
are float64 where the device has it (algorithms.md, section 7, Guards). Row T of every table is NOWHERE: padding reads and
writes it, no node does. Only one row of the vocabulary is touched per tree, that of its stop node.

Legend: B trees, T nodes, G gathered tokens, C children, M children of one wave, N nodes of the largest tree, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn.functional import pad

from rootward.core.verification.batched import Forest, columns, draft_rows
from rootward.core.verification.sparse import ALGORITHMS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Shape(NamedTuple):
    """What is static. `waves`: number of children in each wave (algorithms of `batched`)."""

    num_trees: int
    num_nodes: int
    num_columns: int
    tree_size: int
    waves: tuple[int, ...]

    @staticmethod
    def of(forest: Forest, num_columns: int) -> Shape:
        """The smallest that a forest fits in."""
        largest = int(np.diff(forest.start).max())
        return Shape(len(forest), forest.num_nodes, max(num_columns, 1), largest, tuple(map(len, forest.waves)))

    def fits(self, other: Shape) -> bool:
        """Whether forests of the other shape can be placed in this one."""
        waves = len(self.waves) >= len(other.waves) and all(
            a >= b for a, b in zip(self.waves, other.waves, strict=False)
        )
        return waves and all(a >= b for a, b in zip(self[:4], other[:4], strict=True))


@dataclass(frozen=True)
class Placed:
    """A forest on a device, padded to a shape. Entry T of the node tables is NOWHERE.

    ids_TG     int64[T, G]      gathered tokens, -1 where there is none
    weight_TG  float32[T+1, G]  integer weights of the draft rows
    parent_T, column_T, depth_T int64[T+1]; sampled_T bool[T+1]
    child_C    int64[ΣM]        children, wave after wave
    order_BN   int64[B, N]      nodes of each tree in post-order, then padding; its root is root_B
    """

    shape: Shape
    ids_TG: torch.Tensor
    weight_TG: torch.Tensor
    parent_T: torch.Tensor
    column_T: torch.Tensor
    depth_T: torch.Tensor
    sampled_T: torch.Tensor
    child_C: torch.Tensor
    order_BN: torch.Tensor
    root_B: torch.Tensor


class DeviceLaw(NamedTuple):
    """`ForestLaw` as tensors: stop, entry, budget, tail_scale [T] in double, residual [T, G]."""

    stop_T: torch.Tensor
    entry_T: torch.Tensor
    budget_T: torch.Tensor
    residual_TG: torch.Tensor
    tail_scale_T: torch.Tensor


class Verdicts(NamedTuple):
    """[B] each: stop node (number in the forest), bonus token, block efficiency, mass of the row the bonus was drawn from."""

    stop_B: torch.Tensor
    bonus_B: torch.Tensor
    expected_B: torch.Tensor
    mass_B: torch.Tensor

    def to_host(self, num_trees: int) -> tuple[Ints, Ints, Floats]:
        """(stop, bonus, block efficiency) of the trees that are no padding: the one place where the host waits, once."""
        table = torch.stack([column.to(self.expected_B.dtype) for column in self])  # numbers and ids are exact in it
        stop, bonus, expected, mass = table.cpu().numpy()[:, :num_trees]
        if not (mass > 0.0).all():
            raise ValueError(f"probs: mass {mass[~(mass > 0.0)][0]} at a stop node; give rows that are laws")
        return stop.astype(np.int64), bonus.astype(np.int64), expected.astype(np.float64)


def wide(device: torch.device) -> torch.dtype:
    """The type of sums and budgets."""
    return torch.float32 if device.type == "mps" else torch.float64


def place(
    forest: Forest,
    ids: ArrayLike,
    weight: ArrayLike,
    vocab: int,
    device: torch.device | str,
    shape: Shape | None = None,
) -> Placed:
    """Tables of a forest. ids int64[T, G] from `batched.gather_ids`, weight int[T, K]; padded to `shape` if it is given."""
    G, n = draft_rows(forest, ids, weight)
    if int(G.max(initial=0)) >= vocab:
        raise ValueError(f"ids: {int(G.max())} is outside [0, {vocab})")
    column, own = columns(forest, G, n), Shape.of(forest, G.shape[1])
    shape = shape or own
    if not shape.fits(own):
        raise ValueError(f"shape: {shape}; the forest needs {own}")
    T = shape.num_nodes
    waves = forest.waves + [np.empty(0, np.int64)] * (len(shape.waves) - len(forest.waves))
    child = [_padded(wave, (size,), T) for wave, size in zip(waves, shape.waves, strict=True)]
    order = np.full((len(forest), own.tree_size), T)
    order[forest.tree, np.arange(forest.num_nodes) - forest.start[forest.tree]] = forest.post_order
    tables = (
        _padded(G, (T, shape.num_columns), -1),
        _padded(n.astype(np.float32), (T + 1, shape.num_columns), 0),
        _padded(np.where(forest.parent < 0, T, forest.parent), (T + 1,), T),
        _padded(column, (T + 1,), 0),
        _padded(forest.depth, (T + 1,), 0),
        _padded(forest.sampled, (T + 1,), False),
        np.concatenate([np.empty(0, np.int64), *child]),
        _padded(order, (shape.num_trees, shape.tree_size), T),
        _padded(forest.start[:-1], (shape.num_trees,), T),
    )
    return Placed(shape, *(torch.from_numpy(table).to(device, non_blocking=True) for table in tables))


@torch.no_grad()  # not inference_mode: compilers refuse views in it
def verify(
    algorithm: str, placed: Placed, probs_TV: torch.Tensor, coins_T: torch.Tensor, u_B: torch.Tensor
) -> Verdicts:
    """The verdicts of one round of every tree. algorithm: "token" or "traversal".

    probs_TV  target laws after processors; rows of padding nodes may hold anything finite
    coins_T   a uniform per node, in [0, 1)
    u_B       one per tree for its bonus token, in [0, 1); or [B, D]: one for every depth at which its round may stop
    """
    p_TG, tail_T, whole_T = gathered(probs_TV, placed.ids_TG)
    law = device_law(algorithm, placed, p_TG, tail_T)
    stop_B = stop_nodes(algorithm, placed, law, coins_T).clamp(max=placed.shape.num_nodes - 1)  # trees of padding
    row_BV = probs_TV[stop_B].to(tail_T.dtype) * (law.tail_scale_T / whole_T)[stop_B, None]
    ids_BG = _outside(placed.ids_TG[stop_B], row_BV.shape[1])
    row_BV = pad(row_BV, (0, 1)).scatter(1, ids_BG, law.residual_TG[stop_B].to(row_BV.dtype))[:, :-1]
    if u_B.dim() == 2:
        u_B = u_B.gather(1, placed.depth_T[stop_B][:, None])[:, 0]
    bonus_B, mass_B = drawn(row_BV, u_B)
    stop, order = pad(law.stop_T, (0, 1)), placed.order_BN
    return Verdicts(stop_B, bonus_B, 1.0 + (stop[order] * placed.depth_T[order]).sum(1), mass_B)


def gathered(probs_TV: torch.Tensor, ids_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mass at ids [T, G], 0 where there is none; mass of all others [T]; mass of the row [T]), the first two per unit of it.

    The tail is summed over the complement in double: 1 − Σ would keep only the rounding errors of a small tail.
    """
    ids = _outside(ids_TG, probs_TV.shape[1])
    rest_TV = pad(probs_TV, (0, 1))  # our own copy; the last column takes the padding
    p_TG = rest_TV.gather(1, ids)
    tail_T = rest_TV.scatter_(1, ids, 0.0).sum(-1, dtype=wide(probs_TV.device))
    whole_T = p_TG.sum(-1, dtype=tail_T.dtype) + tail_T
    return (p_TG.to(whole_T.dtype) / whole_T[:, None]).to(probs_TV.dtype), tail_T / whole_T, whole_T


def device_law(algorithm: str, placed: Placed, p_TG: torch.Tensor, tail_T: torch.Tensor) -> DeviceLaw:
    """`batched.forest_law`. p_TG, tail_T: target mass at the gathered tokens and elsewhere."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: {algorithm!r}; the device form has {', '.join(ALGORITHMS)}")
    p, t, n = pad(p_TG, (0, 0, 0, 1)), pad(tail_T, (0, 1), value=1.0), placed.weight_TG.to(p_TG.dtype, copy=True)
    entry, budget = torch.ones_like(t), torch.ones_like(t)
    reached = torch.zeros_like(t).index_fill_(0, placed.root_B, 1.0)  # and passed the children so far (token-level)
    for child in placed.child_C.split_with_sizes(placed.shape.waves):
        v, j = placed.parent_T[child], placed.column_T[child]
        q = _child_laws(n[v], j, placed.sampled_T[child])
        a, left, p[v], t[v] = _steps(budget[v], p[v], t[v], q, j)
        n.view(-1).index_fill_(0, v * n.shape[1] + j, 0.0)
        entry[child] = a
        if algorithm == "traversal":
            budget[child], budget[v] = a, left
        else:
            reached[child] = reached[v] * a
            reached[v] *= 1.0 - a
    stop = _stop_in_post_order(placed, budget) if algorithm == "traversal" else reached[:-1]
    scale = torch.where(tail_T > 0.0, t[:-1] / tail_T, 0.0)
    return DeviceLaw(stop, entry[:-1], budget[:-1], p[:-1], scale)


def stop_nodes(algorithm: str, placed: Placed, law: DeviceLaw, coins_T: torch.Tensor) -> torch.Tensor:
    """int64[B]: the node where each round stops; NOWHERE for a tree of padding."""
    nowhere, order = placed.shape.num_nodes, placed.order_BN
    if algorithm == "traversal":
        success = pad(coins_T < law.budget_T, (0, 1))[order] | (order == placed.root_B[:, None])
        first = success.to(torch.int8).argmax(1, keepdim=True)  # the first of several maxima, by its documentation
        return order.gather(1, first)[:, 0]
    node = torch.arange(nowhere + 1, device=order.device)
    accepted = torch.where(pad(coins_T < law.entry_T, (0, 1)), node, nowhere)
    first_child = torch.full_like(node, nowhere).scatter_reduce(0, placed.parent_T, accepted, "amin")
    down = torch.where(first_child < nowhere, first_child, node)
    down[nowhere] = nowhere  # there the roots are children
    for _ in range(len(placed.shape.waves).bit_length()):  # no path is longer than there are waves
        down = down[down]
    return down[placed.root_B]


def drawn(row_BV: torch.Tensor, u_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token [B], mass of the row [B]) by inverse distribution function, as in `residual.draw_residual`.

    Never a token without mass, also where sums are added up in an order of the device's own: only tokens with mass
    raise the running maximum.
    """
    cumulative = torch.where(row_BV > 0.0, row_BV.cumsum(-1), 0.0).cummax(-1).values
    total = cumulative[:, -1:].contiguous()
    goal = u_B[:, None].to(total.dtype) * total
    # u · total may round up to the total: then the first token that reaches it, which has mass.
    below = torch.minimum(torch.searchsorted(cumulative, goal, right=True), torch.searchsorted(cumulative, total))
    return below[:, 0], total[:, 0]


def _steps(
    w_M: torch.Tensor, p_MG: torch.Tensor, t_M: torch.Tensor, q_MG: torch.Tensor, j_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`batched.steps`: (a, w', P', t')."""
    offered = w_M[:, None].to(p_MG.dtype) * p_MG
    at = j_M[:, None]
    accept = (offered.gather(1, at).to(w_M.dtype) / q_MG.gather(1, at).to(w_M.dtype))[:, 0].clamp(max=1.0)
    rest = (offered - q_MG).clamp(min=0.0)
    mass = rest.sum(-1, dtype=w_M.dtype) + w_M * t_M
    nothing, whole = mass == 0.0, mass + (1.0 - w_M)
    left = torch.where(whole > 0.0, mass / torch.where(whole > 0.0, whole, 1.0), 1.0)
    divisor = torch.where(nothing, 1.0, mass)
    accept = torch.where(nothing & (w_M == 1.0) & (accept > 0.0), 1.0, accept)  # P = Q: `step.nothing_left`
    p_left = torch.where(nothing[:, None], p_MG, (rest.to(w_M.dtype) / divisor[:, None]).to(p_MG.dtype))
    return accept, left, p_left, torch.where(nothing, t_M, w_M * t_M / divisor)


def _child_laws(n_MG: torch.Tensor, j_M: torch.Tensor, sampled_M: torch.Tensor) -> torch.Tensor:
    """[M, G]: the law each child was drawn from; chosen children, and NOWHERE: one-hot."""
    total = n_MG.sum(-1, dtype=wide(n_MG.device)).to(n_MG.dtype)
    one_hot = torch.zeros_like(n_MG).scatter(1, j_M[:, None], 1.0)
    return torch.where(sampled_M[:, None], n_MG / torch.where(sampled_M, total, 1.0)[:, None], one_hot)


def _stop_in_post_order(placed: Placed, budget: torch.Tensor) -> torch.Tensor:
    """[T]: budget times the probability that every node before it in post-order has failed."""
    order_BN = placed.order_BN
    here = pad(budget[:-1], (0, 1))[order_BN]  # NOWHERE never succeeds
    passed = pad(1.0 - here[:, :-1], (1, 0), value=1.0).cumprod(1)
    return torch.zeros_like(budget).scatter(0, order_BN.view(-1), (here * passed).view(-1))[:-1]


def _outside(ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """ids with the column behind the vocabulary where there is none."""
    return torch.where(ids < 0, vocab, ids)


def _padded(table: NDArray[Any], shape: tuple[int, ...], value: int) -> NDArray[Any]:
    """A table in the first corner of a larger one."""
    larger = np.full(shape, value, dtype=table.dtype)
    larger[tuple(map(slice, table.shape))] = table
    return larger
