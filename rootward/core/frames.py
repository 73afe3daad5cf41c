"""Messages between verifier and drafter as values, without their encoding (protocol.md 1.1).

A *slot* is a number that the verifier gives to one tree on one stream. It is never reused on that stream, so that late frames of closed
slots are recognised. *base_len* and *base_hash* name the committed prefix that the sender knew. Node ids count up from 1 per slot; parent 0
is the root of the frame's base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rootward.core.requests import BEST_FIRST, DraftMode, DraftStrategy, Sampling

PROTOCOL = 2  # version of the verifier ↔ drafter protocol spoken by this code

_MASK = (1 << 64) - 1
_BASE = 0x5851F42D4C957F2D  # odd
_CHUNK = 4096
_POWERS = np.multiply.accumulate(np.array([1] + [_BASE] * (_CHUNK - 1), dtype=np.uint64))[::-1]


def extend_hash(value: int, token: int) -> int:
    """Rolling 64-bit hash of a token sequence: hash so far times a constant, plus splitmix64 of the token. The empty prefix has hash 0."""
    z = (0x9E3779B97F4A7C15 * (token + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value * _BASE + (z ^ (z >> 31))) & _MASK


def prefix_hash(tokens: Sequence[int], value: int = 0) -> int:
    """`extend_hash` by one token after the other, for long prefixes: a polynomial, so it is summed in chunks."""
    for at in range(0, len(tokens), _CHUNK):
        z = np.asarray(tokens[at : at + _CHUNK], dtype=np.int64).astype(np.uint64) + np.uint64(1)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        value = (value * pow(_BASE, len(z), 1 << 64) + int(np.dot(z, _POWERS[-len(z) :]))) & _MASK
    return value


FEATURE_NUMBERS = 1 << 17  # in one message, at most
MAX_FEATURES = 4096  # tokens of a text that a draft head reads when a tree is opened


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Fused hidden states of the target before each of n consecutive tokens, for a draft head (`engine.heads`). Missing ones cost only
    acceptance.

    rows  float32[n, size]
    int8  they travel as int8 with a scale per row, otherwise as bfloat16
    """

    rows: NDArray[np.float32]
    int8: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire, without the framing."""
        num_rows: int = len(self.rows)
        return num_rows * (self.size + 4 if self.int8 else 2 * self.size)

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return int(self.rows.shape[1])

    @property
    def most_rows(self) -> int:
        """Most rows in one message."""
        return max(1, FEATURE_NUMBERS // self.size)

    def chunks(self, slot: int, end: int) -> list[OpenFeatures]:
        """As messages; end: number of the token after the last one."""
        first, step = end - len(self.rows), self.most_rows
        parts = [self.rows[at : at + step] for at in range(0, len(self.rows), step)]
        return [OpenFeatures(slot, first + i * step, Features(part, self.int8)) for i, part in enumerate(parts)]


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The draft head of a drafter, and how it wants features."""

    fingerprint: str
    feature_size: int  # numbers in a feature
    int8: bool = False  # as int8 with a scale per row; otherwise bfloat16


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of the verifier on a stream."""

    worker: str
    incarnation: int  # random u64 per process
    tokenizer_hash: str  # content hash; "" when the model has no tokenizer
    vocab_size: int
    max_positions: int
    protocol: int = PROTOCOL
    head: str = ""  # fingerprint of the draft head whose features it can send; "": none


@dataclass(frozen=True, slots=True)
class HelloAck:
    """First message of the drafter. `refusal` is not empty when the pairing cannot work; the stream then ends."""

    worker: str
    incarnation: int
    tokenizer_hash: str
    vocab_size: int
    max_positions: int
    laws: tuple[DraftMode, ...]
    capacity: int  # sessions this drafter can hold
    max_atoms: int  # largest K
    refusal: str = ""
    protocol: int = PROTOCOL
    strategy: DraftStrategy = BEST_FIRST  # that it grows by when a request names none
    head: DraftHead | None = None  # that it drafts with; every commit then starts a new tree


@dataclass(frozen=True, slots=True)
class Open:
    """Starts a tree for a session."""

    slot: int
    epoch: int
    prefix: tuple[int, ...]  # prompt + committed tokens; the last one is the root
    sampling: Sampling
    law: DraftMode
    seed: int
    choice: int
    num_atoms: int  # K
    node_cap: int  # most nodes alive below the root
    max_depth: int
    topk: int  # most children per node
    eos_ids: tuple[int, ...] = ()  # never draft below these
    ahead_cap: int = 0  # most nodes alive in guesses and below them; 0: no guesses
    prediction: tuple[int, ...] = ()  # the output that the client expects, from its beginning
    num_prompt: int = 0  # tokens of prefix before the output; read with a prediction
    traceparent: str = ""  # W3C trace context of the session; "": none
    tenant: int = 0  # 64-bit number of the tenant, which says nothing of its name; tenants share rows fairly
    node_budget: int | None = None  # nodes that the first round may verify; None: node_cap
    strategy: DraftStrategy = BEST_FIRST
    cache_salt: int = 0  # such a number; texts with different salts never share cached prefixes
    num_features: int = 0  # tokens at the end of prefix whose features follow; a head reads no others

    @property
    def caps(self) -> tuple[int, int]:
        """(most live nodes of the root's component, of guesses and below them). Under target matching all nodes may be verified, so there
        are no guesses and growth ahead is part of the root's component."""
        whole = self.node_cap + self.ahead_cap
        return (self.node_cap, self.ahead_cap) if self.law.ratio else (whole, 0)

    def fault(self, most_nodes: int) -> str:
        """Why the message is refused; "" if it is valid."""
        shape = {name: getattr(self, name) for name in ("node_cap", "max_depth", "topk", "num_atoms")}
        if not self.prefix or min(shape.values()) < 1 or sum(self.caps) > most_nodes:
            return f"prefix of {len(self.prefix)} tokens, {shape}, ahead_cap {self.ahead_cap}: out of range"
        try:
            self.strategy.check_mode(self.law)
        except ValueError as wrong:
            return str(wrong)
        return ""

    @property
    def largest_token(self) -> int:
        """Largest token id in the message that the draft model uses: text, allowed tokens and biases."""
        sampling = self.sampling
        return max((*self.prefix, *sampling.allowed_token_ids, *(token for token, _ in sampling.logit_bias)))


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens were committed after the prefix of length base_len; hash_after is the hash of the whole.

    runs         lengths of the rounds that were merged here, in order; (): one
    node_budget  nodes that the next round may verify; 0: stop growing; None: as before
    """

    slot: int
    base_len: int
    tokens: tuple[int, ...]
    hash_after: int
    runs: tuple[int, ...] = ()
    node_budget: int | None = None
    features: Features | None = field(default=None, compare=False)  # of the last of these tokens

    @property
    def rounds(self) -> list[tuple[int, ...]]:
        """The tokens of each round: accepted path, then the bonus token."""
        ends = list(accumulate(self.runs or (len(self.tokens),)))
        return [self.tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True)
class OpenFeatures:
    """A part of the features that an Open announces. first: number of the first token in the text."""

    slot: int
    first: int
    features: Features = field(compare=False)


@dataclass(frozen=True, slots=True)
class Launch:
    """The round at the text of length base_len runs, with a snapshot of the tree. bonus_key: of its bonus noise alone (`rng.Key.bonus`)."""

    slot: int
    base_len: int
    bonus_key: int


@dataclass(frozen=True, slots=True)
class Close:
    slot: int
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Grow:
    """Nodes drawn since the last frame, in draw order, and the draft distributions that they were drawn from.

    parent, token: int64[n]; sampled, guess: bool[n]; node i has id first_node + i. guess: None is none.
    rows: expanded node id (0 = the root of the base) → (ids int64[k], weight int64[k]); law of the sampled children = weight / sum.
    """

    slot: int
    base_len: int
    base_hash: int
    first_node: int
    parent: NDArray[np.int64]
    token: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=dict)
    at_rest: bool = False  # nothing more will be drawn until the next Commit
    draft_us: int = 0
    queue_us: int = 0  # that the commit it answers waited for its turn; the drafter's service knows
    guess: NDArray[np.bool_] | None = None
    fault: str = ""  # why the columns of a frame that came over a wire could not be read; they are then empty

    @property
    def guesses(self) -> NDArray[np.bool_]:
        """bool[n]: guesses of the bonus token, which no round verifies."""
        return self.guess if self.guess is not None else np.zeros(len(self.token), dtype=np.bool_)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grow):
            return NotImplemented
        scalars = ("slot", "base_len", "base_hash", "first_node", "at_rest", "draft_us", "queue_us")
        columns = ("parent", "token", "sampled", "guesses")
        return (
            all(getattr(self, name) == getattr(other, name) for name in scalars)
            and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)
            and self.rows.keys() == other.rows.keys()
            and all(np.array_equal(self.rows[node], other.rows[node]) for node in self.rows)
        )


@dataclass(frozen=True, slots=True)
class NeedSync:
    """The drafter is out of sync; it has a prefix of length have_len with hash have_hash."""

    slot: int
    have_len: int
    have_hash: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The drafter cannot take (or keep) this slot."""

    slot: int
    reason: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Heartbeat of a drafter. own_sessions: of `sessions`, those of the verifier that it is sent to; None: not known."""

    sessions: int = 0
    capacity: int = 0
    queue_us: int = 0
    incarnation: int = 0
    draining: bool = False
    own_sessions: int | None = None


@dataclass(frozen=True, slots=True)
class ToDrafter:
    """One frame of the verifier: everything of one engine step, for all sessions of the pair."""

    hello: Hello | None = None
    opens: tuple[Open, ...] = ()
    commits: tuple[Commit, ...] = ()
    closes: tuple[Close, ...] = ()
    features: tuple[OpenFeatures, ...] = ()
    launches: tuple[Launch, ...] = ()
    unreadable: tuple[Reject, ...] = ()  # slots of Opens and features that came over a wire and cannot be read, and why


@dataclass(frozen=True, slots=True)
class FromDrafter:
    """One frame of the drafter: everything of one growth level, for all sessions of the pair."""

    ack: HelloAck | None = None
    grows: tuple[Grow, ...] = ()
    need_syncs: tuple[NeedSync, ...] = ()
    rejects: tuple[Reject, ...] = ()
    load: Load | None = None


# -- waiting frames are joined, so that a slow link queues at most one message of each kind per slot and base ----------------------------


def opened_at(message: Open, commit: Commit) -> Open:
    """The Open message after a commit that follows it."""
    budget = message.node_budget if commit.node_budget is None else commit.node_budget
    return replace(message, prefix=(*message.prefix, *commit.tokens), node_budget=budget)


def joined_features(earlier: Features | None, later: Features | None, num_tokens: int) -> Features | None:
    """Features of a text and of the num_tokens tokens after it; the latter alone where some of them are missing."""
    if earlier is None or later is None or len(later.rows) < num_tokens:
        return later
    return Features(np.concatenate([earlier.rows, later.rows]), later.int8)


def cumulative(earlier: Commit, later: Commit) -> Commit:
    """Two consecutive commits as one, with the last features, as many as a message holds."""
    features = joined_features(earlier.features, later.features, len(later.tokens))
    return replace(
        later,
        base_len=earlier.base_len,
        tokens=(*earlier.tokens, *later.tokens),
        runs=tuple(len(run) for commit in (earlier, later) for run in commit.rounds),
        node_budget=earlier.node_budget if later.node_budget is None else later.node_budget,
        features=features and replace(features, rows=features.rows[-features.most_rows :]),
    )


def joined(earlier: Grow, later: Grow) -> Grow | None:
    """Two frames as one; None if they have different bases or are not consecutive."""
    same_base = (earlier.base_len, earlier.base_hash) == (later.base_len, later.base_hash)
    if not same_base or later.first_node != earlier.first_node + len(earlier.token):
        return None
    return replace(
        later,
        first_node=earlier.first_node,
        parent=np.concatenate([earlier.parent, later.parent]),
        token=np.concatenate([earlier.token, later.token]),
        sampled=np.concatenate([earlier.sampled, later.sampled]),
        rows={**earlier.rows, **later.rows},
        draft_us=earlier.draft_us + later.draft_us,
        guess=np.concatenate([earlier.guesses, later.guesses]),
    )
