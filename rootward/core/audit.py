"""Audit of a drafter: was each child drawn from the distribution that was declared for it?

Ratio tests keep the target's law only if the declared distribution is the sampled one. The audit is a sequential test of

    H0: given everything before, child x was drawn from Q

(Q: the declared distribution, without earlier siblings where they are drawn without replacement). Each *strategy* multiplies its wealth by
a factor per child whose expectation under H0 is exactly 1, so its wealth is a test martingale, and so is their weighted mean M. By
Ville's inequality P(M ever reaches 1/alpha | honest drafter) <= alpha.

    rank         1 + l (1 − 2 z), z = Σ Q(y) over Q(y) > Q(x), plus Q(x)/2, plus those of equal Q and smaller id
    temperature  Q(x)^(b−1) / Σ_y Q(y)^b
    top          1 − e + e [x = y*] / Q(y*), y* the likeliest token
    acceptance   1 + l (a(x) − m), a(y) = min(1, w·P(y)/Q(y)), m = Σ_y Q(y) a(y): the acceptance that a verdict computes
    set          v(h(x)) / Σ_y Q(y) v(h(y)), v(b) = (N_b + c) / (E_b + c) over hashed buckets of tokens, N past draws, E past expected mass

A drafter that turns dishonest after a long honest time has spent the wealth of its strategies first. So beside M there is R, the mean of
products that begin at the first, second, … observation: R_k = (R_{k−1} + 1/(k(k+1))) · factor. The weights of all beginnings add up to 1,
so R never reaches 1/alpha either but with probability alpha: half of alpha is for M, half for R. (An e-detector, Shin, Ramdas, Rinaldo,
2203.03532, gives each beginning the weight 1 and bounds the mean time to a false alarm only.)

Deviations that cancel out on average over the draws (one way at even positions, the other way at odd ones) are not seen.

Legend: n children in draw order, G tokens of a row, S strategies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rootward.core.arrays import Floats, Ints

RANK = (-0.8, -0.3, 0.3, 0.8)
TEMPERATURE = (0.5, 0.8, 1.25, 2.0)
TOP = (0.05, 0.3)
ACCEPTANCE = (-0.8, -0.3, 0.3, 0.8)
STRATEGIES = (
    *(f"rank {bet}" for bet in RANK),
    *(f"temperature {b}" for b in TEMPERATURE),
    *(f"top {e}" for e in TOP),
    *(f"acceptance {bet}" for bet in ACCEPTANCE),
    "set",
)
# Every kind of strategy starts with the same wealth.
LOG_WEIGHTS: Floats = -np.log(5.0 * np.repeat([4, 4, 2, 4, 1], [4, 4, 2, 4, 1]))

BUCKETS, PRIOR = 256, 20.0  # of the strategy "set"; prior: draws that a bucket starts with
MEMORY = 12_800  # draws after which "set" has forgotten all but 1/e of what it saw: a late cheat would be hidden by a long honest time
ALPHA = 1e-6  # probability that an honest drafter is ever caught


@dataclass(frozen=True, eq=False)
class Draws:
    """Drawn children of one drafter in draw order.

    ids     int64[n, G]    tokens, -1 where there is none
    q       float64[n, G]  the distribution that each was drawn from; 0 at pads
    offered float64[n, G]  w·P at these tokens: budget of the parent times the target, at the child's turn
    column  int64[n]       column of the token that was drawn
    """

    ids: Ints
    q: Floats
    offered: Floats
    column: Ints

    def __len__(self) -> int:
        return len(self.column)


def joined(parts: list[Draws]) -> Draws:
    """Several observations as one, padded to the widest; at least one."""
    shape = sum(map(len, parts)), max(part.ids.shape[1] for part in parts)
    found = Draws(np.full(shape, -1), np.zeros(shape), np.zeros(shape), np.concatenate([part.column for part in parts]))
    begin = 0
    for part in parts:
        where = slice(begin, begin + len(part)), slice(part.ids.shape[1])
        found.ids[where], found.q[where], found.offered[where] = part.ids, part.q, part.offered
        begin += len(part)
    return found


def factors(draws: Draws, favour: Floats) -> Floats:
    """float64[n, S]: what each draw multiplies the wealth of each strategy by. favour float64[BUCKETS]: v of the strategy "set"."""
    ids, q, offered, column = draws.ids, draws.q, draws.offered, draws.column
    drawn = np.arange(len(column)), column
    at, token, mass = q[drawn][:, None], ids[drawn][:, None], q[drawn]
    z = (q * ((q > at) | ((q == at) & (ids < token)))).sum(axis=1) + mass / 2
    rank = [1.0 + bet * (1.0 - 2.0 * z) for bet in RANK]
    with np.errstate(divide="ignore"):
        log_q = np.log(q)  # exp(b log q) is several times faster than q ** b
    temperature = [np.exp((b - 1.0) * log_q[drawn]) / np.exp(b * log_q).sum(axis=1) for b in TEMPERATURE]
    best = q.max(axis=1)
    hit = (q.argmax(axis=1) == column) / best
    top = [1.0 - e + e * hit for e in TOP]
    excess = np.minimum(1.0, offered[drawn] / mass) - np.minimum(q, offered).sum(axis=1)
    acceptance = [1.0 + bet * excess for bet in ACCEPTANCE]
    v = favour[bucket(ids)]
    return np.stack([*rank, *temperature, *top, *acceptance, v[drawn] / (q * v).sum(axis=1)], axis=1)


def bucket(ids: Ints) -> Ints:
    """int64[...]: the bucket of each token."""
    return (ids * 2654435761 & 0xFFFFFFFF) >> 24  # Knuth's multiplicative hash


@dataclass
class Record:
    """The wealth of the strategies against one drafter. Logarithms; a restored record goes on where it was saved.

    log_product       float64[S]  product of the factors of each strategy
    log_late          float64[S]  R of each strategy, -inf before the first draw
    num_observations  with draws
    num_draws         how many children were seen
    drawn, expected   float64[BUCKETS]: N and E of the strategy "set"
    """

    log_product: Floats = field(default_factory=lambda: np.zeros(len(STRATEGIES)))
    log_late: Floats = field(default_factory=lambda: np.full(len(STRATEGIES), -np.inf))
    num_observations: int = 0
    num_draws: int = 0
    drawn: Floats = field(default_factory=lambda: np.zeros(BUCKETS))
    expected: Floats = field(default_factory=lambda: np.zeros(BUCKETS))

    def observe(self, draws: Draws) -> Floats:
        """float64[S]: what these draws added to `log_product`. The strategy "set" bets on what was seen before them."""
        if not len(draws):
            return np.zeros(len(STRATEGIES))
        favour = (self.drawn + PRIOR) / (self.expected + PRIOR)
        gain: Floats = np.log(factors(draws, favour)).sum(axis=0)
        self.log_product += gain
        self.num_observations += 1
        weight = 1.0 / (self.num_observations * (self.num_observations + 1))
        self.log_late = np.logaddexp(self.log_late, math.log(weight)) + gain
        self.num_draws += len(draws)
        where, kept = bucket(draws.ids), math.exp(-len(draws) / MEMORY)
        self.drawn *= kept
        self.expected *= kept
        self.drawn += np.bincount(where[np.arange(len(draws)), draws.column], minlength=BUCKETS)
        self.expected += np.bincount(where.ravel(), weights=draws.q.ravel(), minlength=BUCKETS)
        return gain

    @property
    def log_wealth(self) -> float:
        """log M."""
        return log_mean(self.log_product)

    def caught(self, num_drafters: int = 1, alpha: float = ALPHA) -> str:
        """The strategy with the largest wealth if M or R raises an alarm, else "". num_drafters: how many are audited."""
        for log_wealth in (self.log_product, self.log_late):
            if log_mean(log_wealth) >= math.log(2 * num_drafters / alpha):
                return STRATEGIES[int(np.argmax(LOG_WEIGHTS + log_wealth))]
        return ""


def log_mean(log_wealth: Floats) -> float:
    """Logarithm of the weighted mean over the strategies."""
    return float(np.logaddexp.reduce(LOG_WEIGHTS + log_wealth))
