"""RSD-S: a tree drawn by stochastic beam search.

Sources: "Recursive Speculative Decoding" (2402.14160), "Stochastic Beams and Where to Find Them" (1903.06059). Each
beam node carries φ = log q(path) and its perturbed value G (root: 0, 0). For every beam node and token x

    φ_x = φ + log q_v(x);  G_x = φ_x + Gumbel;  Z = max_x G_x;  u = G − G_x + log1p(−exp(G_x − Z))
    G̃_x = G − max(0, u) − log1p(exp(−|u|))

so that the largest G̃ of a family is exactly G. The W largest G̃ of the whole level stay; draw order is decreasing G̃
within a family. It is a race in which leaves arrive at rate q(leaf): place and token of the next arrival never look
at later ones.
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.drafting.levels import RowOf, Sprout, checked_row, positive
from rootward.core.tree import TokenTree


def rsd_s(row: RowOf, width: int, depth: int, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """A stochastic beam of `width` nodes per level, `depth` levels: (tree, draft)."""
    positive("width, depth", [width, depth])
    sprout = Sprout()
    beam: list[tuple[int, float, float]] = [(0, 0.0, 0.0)]  # (node, φ, G)
    rows: dict[int, Floats] = {}
    for _ in range(depth):
        arrivals: list[tuple[float, int, int, float]] = []  # (G̃, place of the parent in the beam, token, φ)
        for place, (node, phi, perturbed) in enumerate(beam):
            rows[node] = law = checked_row(row, sprout.path[node])
            tokens = np.flatnonzero(law)
            phis = phi + np.log(law[tokens])
            values = conditioned_on_maximum(phis + rng.gumbel(size=len(tokens)), perturbed)
            arrivals += zip(values.tolist(), [place] * len(tokens), tokens.tolist(), phis.tolist(), strict=True)
        kept = sorted(arrivals, key=lambda arrival: -arrival[0])[:width]
        kept.sort(key=lambda arrival: arrival[1])  # stable: families in the order of their parents, G̃ decreasing within
        beam = [(sprout.add(beam[place][0], token, True), phi, value) for value, place, token, phi in kept]
    sprout.row = {node: rows[node] for node in sprout.parent[1:]}  # of a beam node without children nothing was drawn
    return sprout.finish(len(rows[0]))


def conditioned_on_maximum(values: Floats, maximum: float) -> Floats:
    """Gumbels shifted so that the largest is exactly `maximum`, numerically stable (1903.06059, appendix B.3)."""
    largest = values.max()
    with np.errstate(divide="ignore"):  # the maximiser: log 0 = −∞, and its value comes out as `maximum`
        u = maximum - values + np.log1p(-np.exp(values - largest))
    shifted: Floats = maximum - np.maximum(0.0, u) - np.log1p(np.exp(-np.abs(u)))
    return shifted
