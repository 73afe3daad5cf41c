"""Values that services and the SDK share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class LosslessLevel(StrEnum):
    """The part of the output that equals plain decoding without speculation."""

    DISTRIBUTION = "distribution"  # greedy tokens may differ where two logits nearly tie
    BITWISE = "bitwise"  # the logits, to the last bit, whatever rows a step has beside a request's own


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a model that peers and users see."""

    name: str
    vocab_size: int
    max_positions: int  # longest context, in tokens
    eos_ids: tuple[int, ...] = ()
    tokenizer_hash: str = ""  # content hash of the tokenizer; "" without one
    num_parameters: int = 0
    supports_trees: bool = True  # False: plain decoding only (refused by the load probe)
    fingerprint: str = ""  # hash of the weights' identity
    lossless: LosslessLevel = LosslessLevel.DISTRIBUTION


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

    def after_round(self, num_nodes: int, num_accepted: int, *, missed: bool = False) -> SpeculationStats:
        """With one more round: `num_accepted` of `num_nodes` nodes. missed: it waited and got no tree."""
        histogram = [*self.acceptance_histogram, *[0] * (num_accepted + 1 - len(self.acceptance_histogram))]
        histogram[num_accepted] += 1
        return replace(
            self,
            num_spec_steps=self.num_spec_steps + (num_nodes > 0),
            num_plain_steps=self.num_plain_steps + (num_nodes == 0),
            num_draft_tokens=self.num_draft_tokens + num_nodes,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens + num_accepted,
            acceptance_histogram=tuple(histogram),
            num_drafter_misses=self.num_drafter_misses + missed,
        )

    @property
    def num_target_passes(self) -> int:
        """Rounds of any kind: each is one pass of the target model."""
        return self.num_spec_steps + self.num_plain_steps

    @property
    def block_efficiency(self) -> float:
        """Tokens per target pass, bonus included, over all rounds."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_target_passes if self.num_target_passes else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per *tree* round, bonus included (vLLM's meaning)."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-softmax of the target's own logits at one token, before any processor. float32 values."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the most likely ones, best first
