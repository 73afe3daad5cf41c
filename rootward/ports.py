"""Interfaces between the parts of Rootward, and the values that cross them.

`Drafter` and `Verifier` have an in-process implementation (the service itself) and a remote one (`rootward/wire/clients.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rootward.core.frames import FromDrafter, HelloAck, Load, Open, ToDrafter
from rootward.core.requests import Committed, VerifierRequest
from rootward.values import LosslessLevel as LosslessLevel
from rootward.values import ModelInfo as ModelInfo

if TYPE_CHECKING:
    import torch

DEFAULT_POOL = "default"  # of workers that no setting puts elsewhere
COMMITTED = -1  # as a parent: the row hangs below the last committed token in the KV cache


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one session in a forward: Q new nodes of its KV tree.

    node   int64[Q]  ids chosen by the caller, unique among the slot's uncommitted nodes
    parent int64[Q]  COMMITTED, the id of a node forwarded earlier, or of a node further up in this same call
    token  int64[Q]
    The logical position of a node is the slot's committed length + its depth below the committed end.
    features  float32[Q, E], for a draft head: what the target knows before each token (`engine.heads`); None: the head's own guess
    """

    slot: int
    node: NDArray[np.int64]
    parent: NDArray[np.int64]
    token: NDArray[np.int64]
    features: NDArray[np.float32] | None = None

    @staticmethod
    def chain(slot: int, first_node: int, tokens: Sequence[int], features: NDArray[np.float32] | None = None) -> Rows:
        """Consecutive tokens below the committed end (a chunk of prefill)."""
        node = np.arange(first_node, first_node + len(tokens), dtype=np.int64)
        parent = np.concatenate([[COMMITTED], node[:-1]]).astype(np.int64)
        return Rows(slot, node, parent, np.asarray(tokens, dtype=np.int64), features)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A function of the logits of a forward, computed on their device, so that less is copied to the host.

    kind   what is static; reductions of one kind differ in their tables alone
    of     (logits [T, V], table float64[T, n]) -> [T, …], row by row: a function of tensors that reads none, so it can be recorded
    table  float64[T, n]
    """

    kind: Hashable
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    table: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TreeToGrow:
    """A tree that a draft head grows for a round. text: the committed tokens, the last one is the root; nodes: most of them."""

    session: Hashable
    text: Sequence[int]
    opening: Open
    nodes: int


class DraftModel(Protocol):
    """A causal language model with a KV tree per slot: a committed chain and, below its end, uncommitted nodes.

    Not thread-safe: one thread drives it.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def num_free_slots(self) -> int: ...

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        """Take a free slot (RuntimeError if there is none). If `tokens`, the text to come, begins like a text known under the
        same `salt`, the slot starts with whole blocks of it committed: `length` tells how many tokens; the last is never held."""

    def close(self, slot: int) -> None:
        """Give the slot back. Its full committed blocks can be found by `open` until their memory is needed."""

    def length(self, slot: int) -> int:
        """Committed tokens whose KV is held."""

    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """ONE forward for all sessions. Returns logits [T, V], rows in the order of the batch: of each entry the last num_logits
        ones (None: all); or what a reduction makes of them. errors.KvFull if blocks are missing, ValueError if a row cannot be
        placed: nothing has changed then."""

    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        """Make the path down to `node` committed. Nodes off that path are freed; those below `node` stay if keep_below."""

    def release(self, slot: int, keep: Collection[int] = ()) -> None:
        """Free every uncommitted node of the slot but those to keep, with every node its parent."""


class LanguageModel(DraftModel, Protocol):
    """A target: its KV memory can be planned and its hidden states read.

    KV memory is given out in blocks of `block_size` tokens as slots need it, and all slots together may ask for more than there is. A
    scheduler adds up what the sessions of a step take and compares with `num_free_blocks`; if that is too little it closes a
    slot and, later, opens one with the same tokens and forwards again what `length` says is not held. One session at its longest always
    fits into an otherwise empty model. Conservation laws (`check_idle`): free + committed + uncommitted cells of a slot, free + idle +
    held blocks.
    """

    @property
    def block_size(self) -> int:
        """Tokens a KV block holds."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that forwards can still take, those kept only because their content may be asked for again included."""

    @property
    def evicted_age_s(self) -> float:
        """Committed text that was in use within so many seconds can still be found by `open`; inf: all of it."""

    def expose(self, states: Sequence[int]) -> None:
        """Which hidden states forwards leave in `states`: i is the input of layer i; the number of layers stands for the last one's
        output after the final norm. (): none, at no cost. ConfigurationError if the network does not let them be read."""

    @property
    def states(self) -> torch.Tensor:
        """[N, sum of their sizes]: exposed states of ALL rows of the last forward, in the order of the batch, side by side."""


class Drafter(Protocol):
    """Grows token trees. One call is one long-lived stream between one verifier and one drafter."""

    def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]: ...


class Verifier(Protocol):
    """Owns the truth: generates, token ids in and committed runs out."""

    def generate(self, request: VerifierRequest) -> AsyncGenerator[Committed, None]: ...

    async def get_info(self) -> VerifierInfo: ...


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    model: ModelInfo
    worker: str = ""
    incarnation: int = 0
    drafters: tuple[str, ...] = ()  # names of the drafters that are up
    num_running: int = 0
    num_waiting: int = 0
    max_sessions: int = 0
    draining: bool = False
    stats: dict[str, float] = field(default_factory=dict)
    version: str = ""  # of the software
    clock_s: float = 0.0  # seconds since 1970 on its clock


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """`ack` is what the drafter answers to a Hello that suits it; `load` is its heartbeat now."""

    model: ModelInfo
    ack: HelloAck
    load: Load = field(default_factory=Load)
    version: str = ""  # of the software
    clock_s: float = 0.0  # seconds since 1970 on its clock


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that was found. `leaving`: it drains, or its pod terminates; it should get nothing new."""

    address: str  # host:port
    zone: str = ""
    leaving: bool = False


class Discovery(Protocol):
    """Finds the workers of one pool (`rootward/discovery/`)."""

    def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        """All of them, and all of them again whenever that changes; for ever. A source that does not answer is asked again; its
        last answer holds meanwhile."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one gateway to drive a request, fenced by `epoch`."""

    request_id: str
    epoch: int
    holder: str
