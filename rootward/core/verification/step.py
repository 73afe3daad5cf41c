"""STEP, the one primitive of every ratio test (algorithms.md, section 2).

    a  = min(1, w·P(x) / Q(x))            acceptance budget of the child x
    R  = [w·P − Q]₊ ;  S = Σ R
    w' = S / (S + (1 − w))                what is left of the budget once x and all below it have failed; 0/0 := 1
    P' = R / S                            and its law; S = 0: keep P

For every token y, with A = Σ_x Q(x)·a(x):  w·P(y) = Q(y)·a(y) + (1 − A)·w'·P'(y).
With w = 1 this is the test of "Fast Inference from Transformers via Speculative Decoding" (2211.17192).
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats


def step(w: float, p: Floats, q: Floats, x: int) -> tuple[float, float, Floats]:
    """STEP(w, P, Q, x) -> (a, w', P') for a child x drawn from Q. Inputs are not changed."""
    if not q[x] > 0.0:
        raise ValueError(f"draft: no mass on the drawn token {x}; declare the law the child was drawn from")
    offered = w * p
    accept = min(1.0, float(offered[x]) / float(q[x]))
    rest = np.maximum(offered - q, 0.0)
    mass = float(rest.sum())
    if mass == 0.0:
        return nothing_left(w, accept), left(w, mass), p
    return accept, left(w, mass), rest / mass


def nothing_left(w: float, accept: float) -> float:
    """a when S = 0. With w = 1 this is P = Q, and a = 1 unless the target forbids x. Computed from P and Q it may
    miss 1 by a rounding; x could then be tried, fail, and still be in the residual distribution."""
    return 1.0 if w == 1.0 and accept > 0.0 else accept


def left(w: float, mass: float) -> float:
    """w' = S / (S + (1 − w)); in this form nothing of a small S is lost when w is near 1."""
    whole = mass + (1.0 - w)
    return mass / whole if whole > 0.0 else 1.0
