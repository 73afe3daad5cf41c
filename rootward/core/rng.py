"""Random numbers as a pure function of a key, without generator state (algorithms.md, section 9).

Philox-4x32-10 ("Parallel Random Numbers: As Easy as 1, 2, 3", Salmon et al. 2011) maps a 64-bit key and a 128-bit
counter to 128 random bits. Every use has a ROLE, and no two roles share a number: the Philox key is derived from
(seed, choice, role), and the role's salt is one of the four counter words as well. Derivation is one-way: a drafter that
has the derived bonus key of a round can compute neither coins nor the bonus noise of another round.

    counter words     0          1                  2                   3
    COIN              node id    position           epoch               salt
    BONUS             token / 2  position           epoch               salt    (text length of the round: in the derived key)
    BONUS             NO_TOKEN   position           epoch               salt    (one uniform; no text length)
    TARGET            token / 2  position           0                   salt
    DRAW              word / 2   draw number, low   draw number, high   salt    (incarnation: in the derived key)

Node ids, positions and epochs are below 2³²; seeds, incarnations and draw numbers below 2⁶⁴.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats, Words

NO_TOKEN = 0xFFFFFFFF  # counter word of the bonus uniform; pairs of token ids end at 2³¹

_LOW = 0xFFFFFFFF
_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85  # Philox multipliers and Weyl increments
_FEW = 8  # up to this many blocks plain integers are faster than arrays


class Role(Enum):
    """The use of a random number; the values are salts."""

    DRAW = 0x64726177  # draft children under ratio tests
    COIN = 0x636F696E  # U_v of a verdict
    BONUS = 0x626F6E75  # bonus tokens, and a drafter's predictions of them
    TARGET = 0x74617267  # the target's own token: plain decoding, match, coupled


@dataclass(frozen=True, slots=True)
class Key:
    """The randomness of one generated sequence: the request's seed and the index of the choice within the request."""

    seed: int
    choice: int = 0

    def __post_init__(self) -> None:
        _within("seed", self.seed, 64)
        _within("choice", self.choice, 64)

    def derive(self, role: Role, *more: int) -> int:
        """The 64-bit Philox key of a role; more: further 64-bit numbers that separate streams of the same role."""
        packed = b"".join(number.to_bytes(8, "little") for number in (self.seed, self.choice, *more))
        digest = blake2b(packed, digest_size=8, person=b"rootward" + role.name.encode()).digest()
        return int.from_bytes(digest, "little")

    def bonus(self, length: int) -> int:
        """The derived key of the bonus noise of the round that begins at this text length, and of nothing else. A drafter that predicts
        the bonus token is told it once the round runs."""
        return self.derive(Role.BONUS, length)


def coins(key: Key, epoch: int, position: int, node_ids: ArrayLike) -> Floats:
    """float64[N] in [0, 1), 53 bits: U_v of the round at this position, one per node id."""
    return coins_batch([(key, epoch, position, node_ids)])


def coins_batch(rounds: Sequence[tuple[Key, int, int, ArrayLike]]) -> Floats:
    """float64[sum of N]: the `coins` of several rounds (key, epoch, position, node ids), one after another, in one pass."""
    nodes = [np.asarray(node_ids, dtype=np.uint64) for *_, node_ids in rounds]
    numbers = [(key.derive(Role.COIN), _counter(position), _counter(epoch)) for key, epoch, position, _ in rounds]
    table = np.array(numbers, dtype=np.uint64).reshape(-1, 3)
    keys, position, epoch = np.repeat(table, [len(ids) for ids in nodes], axis=0).T
    first, _ = _blocks(keys, Role.COIN, np.concatenate([np.empty(0, np.uint64), *nodes]), position, epoch)
    return (first >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bonus_gumbel(bonus_key: int, epoch: int, position: int, tokens: int | ArrayLike) -> Floats:
    """Gumbel noise of the bonus token emitted at a position; `tokens` is V (for 0..V-1) or the ids asked for. bonus_key: `Key.bonus`."""
    return _gumbel(_per_token(bonus_key, Role.BONUS, tokens, _counter(position), _counter(epoch)))


def bonus_coin(key: Key, epoch: int, position: int) -> float:
    """A uniform in [0, 1), 53 bits: the bonus token emitted at a position, by inverse distribution function."""
    counter = (NO_TOKEN, _counter(position), _counter(epoch), Role.BONUS.value)
    low, high, *_ = philox_one(*counter, key.derive(Role.BONUS))
    return ((low | high << 32) >> 11) * 2.0**-53


def target_gumbel(key: Key, position: int, tokens: int | ArrayLike) -> Floats:
    """Gumbel noise of the target's own token at a position; it carries no epoch, so it survives a change of owner."""
    return _gumbel(_per_token(key.derive(Role.TARGET), Role.TARGET, tokens, _counter(position), 0))


def draw_words(key: Key, incarnation: int, draw_number: int, num_words: int) -> Words:
    """uint64[n]: uniform words of one draw number (of a level of a tree); (incarnation, draw number) never repeats within a request."""
    _within("draw_number", draw_number, 64)
    _within("incarnation", incarnation, 64)
    derived, low, high = key.derive(Role.DRAW, incarnation), draw_number & _LOW, draw_number >> 32
    num_blocks = (num_words + 1) // 2
    if num_blocks <= _FEW:
        few = [half for i in range(num_blocks) for half in philox_one(i, low, high, Role.DRAW.value, derived)]
        whole = [first | second << 32 for first, second in zip(few[::2], few[1::2], strict=True)]
        return np.array(whole[:num_words], dtype=np.uint64)
    pair = _blocks(derived, Role.DRAW, np.arange(num_blocks, dtype=np.uint64), low, high)
    return np.stack(pair, axis=1).reshape(-1)[:num_words]


class DrawWords:
    """The words of `draw_words` under one draw number, as a stream. They are computed in batches of growing size."""

    def __init__(self, key: Key, incarnation: int, draw_number: int) -> None:
        self._of = key, incarnation, draw_number
        self._words: Words = np.empty(0, np.uint64)
        self._used = 0

    def __call__(self, num_words: int) -> Words:
        """uint64[n]: never the same twice."""
        first, self._used = self._used, self._used + num_words
        if self._used > len(self._words):
            self._words = draw_words(*self._of, max(self._used, 4, 4 * len(self._words)))
        return self._words[first : self._used]


def philox_one(c0: int, c1: int, c2: int, c3: int, key: int) -> tuple[int, int, int, int]:
    """Philox-4x32-10 of one counter in plain integers, which is faster than arrays for a few blocks."""
    k0, k1 = key & _LOW, key >> 32
    for _ in range(10):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _LOW, (product0 >> 32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def philox(counter: Sequence[Words], key: int | Words) -> tuple[Words, Words, Words, Words]:
    """Philox-4x32-10 of arrays: four counter words and the key, which broadcast. Words are in the low halves of uint64; the low half of a
    key is its first word."""
    c0, c1, c2, c3 = counter
    half, low = np.uint64(32), np.uint64(_LOW)
    k0, k1 = key & _LOW, key >> 32
    for _ in range(10):
        product0, product1 = c0 * np.uint64(_M0), c2 * np.uint64(_M1)
        c0, c1 = (product1 >> half) ^ c1 ^ np.uint64(k0), product1 & low
        c2, c3 = (product0 >> half) ^ c3 ^ np.uint64(k1), product0 & low
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def _blocks(key: int | Words, role: Role, index: Words, second: int | Words, third: int | Words) -> tuple[Words, Words]:
    """The two 64-bit words at each counter (index, second, third, salt); the arguments broadcast."""
    if index.size and int(index.max()) >> 32:
        raise ValueError(f"counter: {index.max()}; use numbers below 2**32")
    counter = np.broadcast_arrays(index, np.uint64(second), np.uint64(third), np.uint64(role.value))
    c0, c1, c2, c3 = philox(counter, key)
    half = np.uint64(32)
    return c0 | c1 << half, c2 | c3 << half


def _per_token(key: int | Words, role: Role, tokens: int | ArrayLike, position: int | Words, epoch: int) -> Words:
    """uint64: 64 bits per token, the same whichever other tokens are asked for (neighbours share a block)."""
    ids = np.asarray(np.arange(tokens) if isinstance(tokens, int | np.integer) else tokens, dtype=np.uint64)
    if ids.size and int(ids.max()) >> 32:
        raise ValueError(f"counter: {ids.max()}; use numbers below 2**32")
    even, odd = _blocks(key, role, ids >> np.uint64(1), position, epoch)
    return np.where(ids & np.uint64(1), odd, even)


def _gumbel(bits: Words) -> Floats:
    """−log E with E = −log(1 − v), v = (r + ½)·2⁻⁵² from the high 52 bits: exact steps where the noise is large."""
    v = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: Floats = -np.log(-np.log1p(-v))
    return noise


def _counter(value: int) -> int:
    """The value, or a ValueError if it is no 32-bit counter word."""
    _within("counter", value, 32)
    return value


def _within(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name}: {value}; use an integer in 0..2**{bits}-1")
