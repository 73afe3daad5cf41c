"""The loops of `rootward.engine.verify`, `atoms`, `noise` and `sampling` over nodes, atoms and tokens, compiled by numba.

A round needs a few thousand operations that depend on each other. Array operations on so few numbers cost more than the arithmetic.
Compiled loops take microseconds, and they compute each number in the same order whatever else is in the batch.

Kernels are compiled on import for the given argument types, and kept in the user's cache directory.

Legend: B trees, T nodes of all trees, G gathered tokens of a node, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import numba
import numpy as np

from rootward.core.distribution import LARGEST
from rootward.core.rng import Role
from rootward.engine import cpu_kernels  # sets the cache directory of numba

exact = {"nogil": True, "cache": True, "error_model": "numpy"}
I1, I2 = numba.int64[::1], numba.int64[:, ::1]
F1, F2 = numba.float64[::1], numba.float64[:, ::1]
B1, U1 = numba.bool_[::1], numba.uint64[::1]
F32_2 = numba.float32[:, ::1]

NUM_BUCKETS, BUCKETS_PER_NAT = 1024, 16  # of scores below the largest
BLOCK = 256  # tokens

# What `check` can find wrong.
OK, BAD_WEIGHT, REPEATED_ID, BAD_TARGET, NO_COLUMN, REPEATED_CHILD, NO_WEIGHT = range(7)


@numba.njit([(F32_2, I2, F2, F1), (F2, I2, F2, F1)], fastmath={"reassoc", "contract"}, **exact)
def gather(probs: Any, ids: Any, at: Any, tail: Any) -> None:
    """at[T, G] = mass of probs[T, V] at ids[T, G], 0 where the id is -1; tail[T] = mass of all other tokens.

    The tail is summed over the complement: 1 − Σ would keep only the rounding errors of a small tail. probs is changed and restored.
    """
    num_nodes, num_ids = ids.shape
    for t in range(num_nodes):
        row = probs[t]
        for g in range(num_ids):
            at[t, g] = row[ids[t, g]] if ids[t, g] >= 0 else 0.0
        for g in range(num_ids):
            if ids[t, g] >= 0:
                row[ids[t, g]] = 0.0
        total = 0.0
        for x in range(len(row)):
            total += row[x]
        tail[t] = total
        for g in range(num_ids):
            if ids[t, g] >= 0:
                row[ids[t, g]] = at[t, g]


@numba.njit([(F32_2, F2, I1, I2)], **exact)
def likeliest(logits: Any, table: Any, tokens: Any, packed: Any) -> None:
    """packed[T, K]: the K likeliest tokens of logits[T, V], by decreasing weight and then by increasing id, both in one number, as
    `atoms.Atoms.reduce` says. table[T, 0]: temperatures; tokens[V]: the tokens of the columns, ascending; empty: token i has column i.
    Few tokens are ever put in order, so the time is that of reading the logits."""
    num = packed.shape[1]
    best, ids = np.empty(num, np.float32), np.empty(num, np.int64)
    for t in range(len(logits)):
        best[:], ids[:] = -np.inf, 0
        for x in range(logits.shape[1]):
            score = logits[t, x]
            if score > best[num - 1]:
                i = num - 1
                while i > 0 and score > best[i - 1]:
                    best[i], ids[i] = best[i - 1], ids[i - 1]
                    i -= 1
                best[i], ids[i] = score, x
        temperature = np.float32(table[t, 0])
        for i in range(num):
            mass = np.exp((best[i] - best[0]) / temperature)
            weight = max(1, int(np.rint(mass * np.float32(LARGEST)))) if mass > 0.0 else 0
            number, j = (LARGEST - weight) << 32 | (tokens[ids[i]] if len(tokens) else ids[i]), i
            while j > 0 and packed[t, j - 1] > number:  # of equal weight
                packed[t, j] = packed[t, j - 1]
                j -= 1
            packed[t, j] = number


@numba.njit([(F32_2, F32_2, F1), (F2, F2, F1)], parallel=cpu_kernels.HAS_THREADS, **exact)
def cut_tail(scores: Any, probs: Any, share: Any) -> None:
    """scores[T, V] = -inf for each token whose likelier ones, and equally likely ones of smaller id, have at least the mass share[T].

    probs[T, V]: softmax of the scores. Tokens are counted by how far they are below the likeliest one; only those of the bucket in
    which the mass is reached are sorted."""
    num_rows, vocab = scores.shape
    for t in numba.prange(num_rows):
        score, prob = scores[t], probs[t]
        largest = score[0]
        for x in range(1, vocab):
            largest = max(largest, score[x])
        mass = np.zeros(NUM_BUCKETS)
        bucket = np.empty(vocab, np.int16)
        for x in range(vocab):
            distance = (largest - score[x]) * BUCKETS_PER_NAT
            bucket[x] = int(distance) if 0.0 <= distance < NUM_BUCKETS - 1 else NUM_BUCKETS - 1  # also if it is NaN
            mass[bucket[x]] += prob[x]
        last, above = 0, 0.0
        while last < NUM_BUCKETS - 1 and not above + mass[last] >= share[t]:  # to the end if the masses are NaN
            above += mass[last]
            last += 1
        num = 0
        edge = np.empty(vocab, np.int64)
        for x in range(vocab):
            if bucket[x] > last:
                score[x] = -np.inf
            elif bucket[x] == last:
                edge[num] = x
                num += 1
        below = largest - score[edge[:num]]
        for i in np.argsort(below, kind="mergesort"):
            if above >= share[t] and above > 0.0:  # one token is always kept
                score[edge[i]] = -np.inf
            above += prob[edge[i]]


@numba.njit([(m, I1, I2, F1, I1) for m in (F32_2, F2)], fastmath={"reassoc", "contract"}, **exact)
def inverse_rows(probs: Any, rows: Any, excluded: Any, share: Any, token: Any) -> None:
    """token[B]: the first token of row rows[b] of probs[T, V] whose cumulative mass exceeds share[b] of the whole, if the tokens
    excluded[b, G] (-1: none) have no mass; share in [0, 1]. Never a token without mass; -1 for a row that has none.

    Masses are summed by blocks, and by tokens within one block. probs is changed and restored.
    """
    vocab, num_excluded = probs.shape[1], excluded.shape[1]
    mass, held = np.empty(-(-vocab // BLOCK)), np.empty(num_excluded, probs.dtype)
    for b in range(len(rows)):
        row, total = probs[rows[b]], 0.0
        for g in range(num_excluded):
            if excluded[b, g] >= 0:
                held[g] = row[excluded[b, g]]
        for g in range(num_excluded):
            if excluded[b, g] >= 0:
                row[excluded[b, g]] = 0.0
        for i in range(len(mass)):
            block, sum_of_block = row[i * BLOCK : (i + 1) * BLOCK], 0.0
            for x in range(len(block)):
                sum_of_block += block[x]
            mass[i] = sum_of_block
            total += sum_of_block
        goal, below, i = share[b] * total, 0.0, 0
        while i < len(mass) - 1 and below + mass[i] <= goal:
            below += mass[i]
            i += 1
        token[b] = -1
        if total > 0.0:  # not if it is NaN
            for x in range(i * BLOCK, vocab):  # rounding may lead to the end of the block and on
                if row[x] > 0.0:
                    token[b] = x
                    below += row[x]
                    if below > goal:
                        break
            x = vocab
            while token[b] < 0:  # rounding has led to blocks without mass
                x -= 1
                if row[x] > 0.0:
                    token[b] = x
        for g in range(num_excluded):
            if excluded[b, g] >= 0:
                row[excluded[b, g]] = held[g]


@numba.njit([(F2, F1)], **exact)
def normalise(at: Any, tail: Any) -> None:
    """Divide at[T, G] and tail[T] by the mass of their row, which is 1 up to the rounding of a softmax in float32."""
    for t in range(len(tail)):
        whole = tail[t]
        for g in range(at.shape[1]):
            whole += at[t, g]
        for g in range(at.shape[1]):
            at[t, g] /= whole
        tail[t] /= whole


@numba.njit([(I1, I1, B1, B1, I2, F2, F2, F1, numba.float64, I1)], **exact)
def check(
    parent: Any,
    token: Any,
    sampled: Any,
    copies: Any,
    ids: Any,
    weight: Any,
    target: Any,
    tail: Any,
    tolerance: float,
    column: Any,
) -> tuple[int, int]:
    """(OK, 0), or (fault, node) for the first input of `verify.forest_law` that is wrong. column[T] = index of the token of each node among
    the ids[T, G] of its parent, 0 at roots."""
    num_nodes, num_ids = ids.shape
    taken = np.zeros(ids.shape, dtype=np.bool_)  # by a sibling
    for c in range(num_nodes):
        total, lightest = tail[c], tail[c]
        for g in range(num_ids):
            if not 0.0 <= weight[c, g] < np.inf or (weight[c, g] > 0.0 and ids[c, g] < 0):  # NaN fails every comparison
                return BAD_WEIGHT, c
            total += target[c, g]
            lightest = min(lightest, target[c, g])
        if not abs(total - 1.0) <= tolerance or not lightest >= 0.0:
            return BAD_TARGET, c
        ordered = np.sort(ids[c])
        for g in range(1, num_ids):
            if ordered[g] == ordered[g - 1] and ordered[g] >= 0:
                return REPEATED_ID, c
        v, column[c] = parent[c], 0
        if v < 0:
            continue
        while column[c] < num_ids and ids[v, column[c]] != token[c]:
            column[c] += 1
        if column[c] == num_ids:
            return NO_COLUMN, c
        if taken[v, column[c]] and not copies[c]:
            return REPEATED_CHILD, v
        if sampled[c] and not weight[v, column[c]] > 0.0:
            return NO_WEIGHT, c
        taken[v, column[c]] = True
    return OK, 0


@numba.njit([(numba.float64, F1, numba.float64, F1, numba.int64)], **exact)
def step(w: float, p: Any, tail: float, q: Any, column: int) -> tuple[float, float, float]:
    """STEP (`rootward.core.verification.step`) for a row whose tokens outside p[G] have mass `tail` and no draft mass.

    Returns (acceptance budget of the child in this column, what is left of w, tail of the residual); p becomes the residual.
    """
    accept = min(1.0, w * p[column] / q[column])
    mass = w * tail
    for g in range(len(p)):
        mass += max(w * p[g] - q[g], 0.0)
    if mass == 0.0:  # with w = 1 this is P = Q up to rounding: `step.nothing_left`
        return (1.0 if w == 1.0 and accept > 0.0 else accept), (1.0 if w == 1.0 else 0.0), tail
    for g in range(len(p)):
        p[g] = max(w * p[g] - q[g], 0.0) / mass
    return (
        accept,
        mass / (mass + (1.0 - w)),
        w * tail / mass,
    )  # in this form nothing of a small mass is lost when w is near 1


@numba.njit([(I1, I1, B1, B1, B1, I1, F2, F2, F1)], **exact)
def ratio_tests(
    parent: Any,
    turn: Any,
    sampled: Any,
    budgets: Any,
    copies: Any,
    column: Any,
    weight: Any,
    residual: Any,
    tail: Any,
) -> tuple[Any, Any, Any, Any, Any]:
    """The STEPs of all children in the order `turn`: (stop, entry, budget, drawn_from, offered) of `verify.ForestLaw`.

    residual[T, G] and tail[T] hold the target and become the residual distributions; weight[T, G] loses what was drawn without
    replacement.
    """
    num_nodes, num_ids = residual.shape
    stop, entry, budget = np.ones(num_nodes), np.ones(num_nodes), np.ones(num_nodes)
    drawn_from, offered = np.zeros(residual.shape), np.zeros(residual.shape)
    for c in turn:
        v = parent[c]
        if v < 0:
            continue
        if sampled[c]:
            total = weight[v].sum()
            for g in range(num_ids):
                drawn_from[c, g] = weight[v, g] / total
        else:
            drawn_from[c, column[c]] = 1.0
        for g in range(num_ids):
            offered[c, g] = budget[v] * residual[v, g]
        entry[c], left, tail[v] = step(budget[v], residual[v], tail[v], drawn_from[c], column[c])
        if not copies[c]:
            weight[v, column[c]] = 0.0
        if budgets[c]:
            budget[c], budget[v] = entry[c], left
    # With budgets the round stops at the first node in post-order that succeeds; without, it enters the first child that is accepted.
    failed = 1.0 - budget  # probability that no node of the subtree succeeds
    for c in turn[::-1]:
        if parent[c] >= 0:
            failed[parent[c]] *= failed[c]
    for c in turn:  # stop[v]: probability that the round comes to v and has passed the children so far
        v = parent[c]
        if v >= 0:
            stop[c] = stop[v] if budgets[c] else stop[v] * entry[c]
            stop[v] *= failed[c] if budgets[c] else 1.0 - entry[c]
    stop *= budget
    return stop, entry, budget, drawn_from, offered


@numba.njit([(I1, I1, B1, F1, F1, F1)], **exact)
def stop_nodes(parent: Any, turn: Any, budgets: Any, entry: Any, budget: Any, coins: Any) -> Any:
    """int64[T]: where a round that enters the subtree of each node stops; -1 if no node of the subtree succeeds."""
    stop = np.arange(len(parent))
    for v in range(len(parent)):
        if budgets[v] and parent[v] >= 0 and not coins[v] < budget[v]:
            stop[v] = -1
    for c in turn[::-1]:  # so that the child that is tried first has the last word
        if parent[c] >= 0 and (stop[c] >= 0 if budgets[c] else coins[c] < entry[c]):
            stop[parent[c]] = stop[c]
    return stop


PART = {
    "forceinline": True,
    "error_model": "numpy",
}  # inlined, so that a kernel is the same whether it is compiled or read from the cache
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
DRAW = np.uint64(Role.DRAW.value)


@numba.njit(**PART)
def _words(index: Any, key: Any, position: Any, epoch: Any, salt: Any) -> tuple[Any, Any]:
    """The two 64-bit words of Philox-4x32-10 at (index, position, epoch, salt)."""
    c0, c1, c2, c3 = np.uint64(index) & LOW, position & LOW, epoch & LOW, salt & LOW
    k0, k1 = key & LOW, key >> HALF
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> HALF) ^ c1 ^ k0, product1 & LOW
        c2, c3 = (product0 >> HALF) ^ c3 ^ k1, product0 & LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & LOW, (k1 + np.uint64(0xBB67AE85)) & LOW
    return c0 | c1 << HALF, c2 | c3 << HALF


@numba.njit(**PART)
def words_of_block(block: Any, key: Any, draw_number: Any) -> tuple[Any, Any]:
    """The words 2 · block and 2 · block + 1 of `rng.draw_words`, by their derived key."""
    words: tuple[Any, Any] = _words(block, key, draw_number & LOW, draw_number >> HALF, DRAW)
    return words


@numba.njit(**PART)
def _uniform_pair(block: Any, key: Any, position: Any, epoch: Any, salt: Any) -> tuple[float, float]:
    """In (0, 1): the v of `rng.target_gumbel` and `rng.bonus_gumbel` of tokens 2 · block and 2 · block + 1, whose noise is
    −log(−log(1 − v))."""
    first, second = _words(block, key, position, epoch, salt)
    first, second = first >> np.uint64(12), second >> np.uint64(12)
    return (np.float64(first) + 0.5) * 2.0**-52, (np.float64(second) + 0.5) * 2.0**-52


@numba.njit([(U1, U1, U1, numba.uint64, I1, F1)], **exact)
def coins(key: Any, position: Any, epoch: Any, salt: Any, start: Any, coin: Any) -> None:
    """coin[T]: `rng.coins` of nodes 0, 1, ... of each round b, which are start[b] to start[b + 1]; with its key, position and epoch."""
    for b in range(len(key)):
        for v in range(start[b], start[b + 1]):
            word, _ = _words(v - start[b], key[b], position[b], epoch[b], salt)
            coin[v] = np.float64(word >> np.uint64(11)) * 2.0**-53


@numba.njit(**PART)
def _uniforms(uniform: Any, key: Any, position: Any, epoch: Any, salt: Any) -> None:
    """uniform[V]: `_uniform_pair` of all tokens."""
    num_pairs = len(uniform) // 2
    for i in range(num_pairs):
        uniform[2 * i], uniform[2 * i + 1] = _uniform_pair(i, key, position, epoch, salt)
    if len(uniform) % 2:
        uniform[2 * num_pairs] = _uniform_pair(num_pairs, key, position, epoch, salt)[0]


@numba.njit([(U1, U1, U1, numba.uint64, I2, F2)], **exact)
def uniforms_of_tokens(key: Any, position: Any, epoch: Any, salt: Any, tokens: Any, uniform: Any) -> None:
    """uniform[T, A]: that of `_uniform_pair` for tokens[T, A], where row t has key[t], position[t] and epoch[t]."""
    for t in range(len(tokens)):
        for a in range(tokens.shape[1]):
            token = tokens[t, a]
            even, odd = _uniform_pair(token // 2, key[t], position[t], epoch[t], salt)
            uniform[t, a] = odd if token % 2 else even


@numba.njit(**PART)
def _race(mass: Any, uniform: Any) -> int:
    """argmax of mass / E with E = −log(1 − v), the token of the largest log mass + noise; -1 if no token has mass.

    E >= v, so a token can only win if mass > best · v: few tokens need a logarithm, and blocks without any are passed over.
    """
    best, winner = 0.0, -1
    for first in range(0, len(mass), BLOCK):
        last = min(first + BLOCK, len(mass))
        candidates = 0
        for x in range(first, last):
            candidates += mass[x] > best * uniform[x]
        if candidates:
            for x in range(first, last):
                if mass[x] > best * uniform[x]:
                    ratio = mass[x] / -np.log1p(-uniform[x])
                    if ratio > best:
                        best, winner = ratio, x
    return winner


@numba.njit([(m, I1, U1, U1, U1, numba.uint64, I1) for m in (F32_2, F2)], **exact)
def noisy_choice(mass: Any, noise_of: Any, key: Any, position: Any, epoch: Any, salt: Any, choice: Any) -> None:
    """choice[T] = argmax of log mass[T, V] + noise, where row t has the noise number noise_of[t], at key, position and epoch [P]."""
    uniform = np.empty(mass.shape[1])
    for p in range(len(key)):
        _uniforms(uniform, key[p], position[p], epoch[p], salt)
        for t in range(len(mass)):
            if noise_of[t] == p:
                choice[t] = _race(mass[t], uniform)
