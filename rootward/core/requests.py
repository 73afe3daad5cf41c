"""What a generation is, as values: token ids in, runs of committed token ids out.

These types cross every boundary (gateway → verifier → drafter) and know nothing of text, wire or model. Constructors check
ranges and raise `ValueError("field: value fix")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum


class Law(str, Enum):
    """How a drafter makes children (algorithms.md, table 5)."""

    SAMPLED = "sampled"  # drawn without replacement from the declared row: ratio tests
    GREEDY = "greedy"  # k-1 chosen + 1 drawn first: ratio tests
    TOP_K = "top_k"  # chosen, most likely first: verified by target matching
    COUPLED = "coupled"  # shared Gumbel noise: verified by target matching


class Rule(str, Enum):
    """How a verifier decides."""

    TRAVERSAL = "traversal"
    TOKEN = "token"
    MATCH = "match"  # target's own token per node; the rule of TOP_K and COUPLED trees


class SpeculationMode(str, Enum):
    AUTO = "auto"
    DISABLED = "disabled"
    REQUIRED = "required"


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


def _require(ok: bool, name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {value!r} {fix}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Processors of the target's law. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        t, p = self.temperature, self.top_p
        _require(math.isfinite(t) and 0 <= t <= 100, "temperature", t, "is outside [0, 100]; 0 decodes greedily")
        _require(self.top_k >= 0, "top_k", self.top_k, "is negative; use 0 to keep every token")
        _require(math.isfinite(p) and 0 < p <= 1, "top_p", p, "is outside (0, 1]; use 1 to keep every token")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a generation ends, by tokens. `eos_ids` comes from the model; stop strings are the gateway's."""

    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "is below 1; ask for at least one token")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Per-request control. None = the server's policy."""

    mode: SpeculationMode = SpeculationMode.AUTO
    rule: Rule | None = None
    law: Law | None = None
    num_draft_tokens: int | None = None
    max_depth: int | None = None
    topk: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "max_depth", "topk"):
            value = getattr(self, name)
            _require(value is None or 1 <= value <= 1024, name, value, "is outside [1, 1024]")
        n, d = self.num_draft_tokens, self.max_depth
        _require(n is None or d is None or d <= n, "max_depth", d, f"is larger than num_draft_tokens {n}")
        ratio = self.rule in (Rule.TRAVERSAL, Rule.TOKEN)
        chosen = self.law in (Law.TOP_K, Law.COUPLED)
        _require(
            not (ratio and chosen), "law", self.law, "needs rule 'match': the target's own tokens decide on such trees"
        )


@dataclass(frozen=True, slots=True)
class VerifierRequest:
    """One attempt at a generation. `committed` is not empty when a lost attempt is resumed; offsets count from the prompt's end."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    speculation: Speculation = field(default_factory=Speculation)
    committed: tuple[int, ...] = ()
    epoch: int = 1
    seed: int = 0  # always set: the gateway draws one when the client gives none
    choice: int = 0
    deadline_s: float | None = None  # seconds from now; None = no deadline

    def __post_init__(self) -> None:
        _require(len(self.prompt) > 0, "prompt", "", "is empty; give at least one token")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "is outside [0, 2^64)")
        _require(self.epoch >= 1, "epoch", self.epoch, "is below 1")


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts of one generation. Names and meanings follow vLLM's speculative-decoding metrics."""

    num_spec_steps: int = 0  # rounds verified on a tree
    num_plain_steps: int = 0  # rounds without a tree
    num_draft_tokens: int = 0  # nodes verified, root excluded
    num_accepted_draft_tokens: int = 0  # bonus tokens excluded
    acceptance_histogram: tuple[int, ...] = ()  # [d] = rounds that accepted exactly d draft tokens
    num_drafter_misses: int = 0  # rounds that waited and got no tree
    drafter: str = ""
    verification: str = ""
    seed: int = 0

    @property
    def block_efficiency(self) -> float:
        """Tokens per target pass, bonus included, over all rounds."""
        rounds = self.num_spec_steps + self.num_plain_steps
        return 1.0 + self.num_accepted_draft_tokens / rounds if rounds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per *tree* round, bonus included (vLLM's meaning)."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None = None  # the eos or stop token that ended it
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True, slots=True)
class Committed:
    """A run of tokens that became final. `accepted[i]` is True for an accepted draft token, False for a bonus token."""

    epoch: int
    offset: int  # output position of tokens[0]; the prompt does not count
    tokens: tuple[int, ...]
    accepted: tuple[bool, ...]
    finish: Finish | None = None  # on the last message only
