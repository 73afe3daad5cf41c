"""Domain types shared by several messages ↔ protobuf: models, enums, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from rootward.core.requests import DraftMode, FinishReason, Rule, SpeculationMode, SpeculationStats
from rootward.ports import ModelInfo
from rootward.v1 import control_pb2, drafter_pb2, generate_pb2, verifier_pb2

E = TypeVar("E", bound=Enum)

LAWS: dict[DraftMode, drafter_pb2.Law.ValueType] = {
    DraftMode.SAMPLED: drafter_pb2.LAW_SAMPLED,
    DraftMode.GREEDY: drafter_pb2.LAW_GREEDY,
    DraftMode.TOP_K: drafter_pb2.LAW_TOP_K,
    DraftMode.COUPLED: drafter_pb2.LAW_COUPLED,
}
RULES: dict[Rule, verifier_pb2.Rule.ValueType] = {
    Rule.TRAVERSAL: verifier_pb2.RULE_TRAVERSAL,
    Rule.TOKEN: verifier_pb2.RULE_TOKEN,
    Rule.MATCH: verifier_pb2.RULE_MATCH,
}
MODES: dict[SpeculationMode, generate_pb2.Speculation.Mode.ValueType] = {
    SpeculationMode.AUTO: generate_pb2.Speculation.AUTO,
    SpeculationMode.DISABLED: generate_pb2.Speculation.DISABLED,
    SpeculationMode.REQUIRED: generate_pb2.Speculation.REQUIRED,
}
REASONS: dict[FinishReason, generate_pb2.Finish.Reason.ValueType] = {
    FinishReason.STOP: generate_pb2.Finish.STOP,
    FinishReason.LENGTH: generate_pb2.Finish.LENGTH,
    FinishReason.ABORTED: generate_pb2.Finish.ABORTED,
}


def from_enum(values: Mapping[E, int], number: int, name: str) -> E:
    """The domain value of an enum number; ValueError if there is none."""
    for value, known in values.items():
        if known == number:
            return value
    known_values = ", ".join(f"{n} ({v.value})" for v, n in values.items())
    raise ValueError(f"{name}: {number} is unknown; use one of {known_values}")


def stats_to_pb(value: SpeculationStats) -> generate_pb2.SpeculationStats:
    drafted = value.num_draft_tokens
    return generate_pb2.SpeculationStats(
        num_spec_steps=value.num_spec_steps,
        num_plain_steps=value.num_plain_steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=value.num_accepted_draft_tokens,
        mean_acceptance_length=value.mean_acceptance_length,
        draft_acceptance_rate=value.num_accepted_draft_tokens / drafted if drafted else 0.0,
        acceptance_histogram=value.acceptance_histogram,
        num_drafter_misses=value.num_drafter_misses,
        drafter=value.drafter,
        verification=value.verification,
        seed=value.seed,
    )


def stats_from_pb(pb: generate_pb2.SpeculationStats) -> SpeculationStats:
    """The counts; the two ratios are computed from them and not read."""
    return SpeculationStats(
        num_spec_steps=pb.num_spec_steps,
        num_plain_steps=pb.num_plain_steps,
        num_draft_tokens=pb.num_draft_tokens,
        num_accepted_draft_tokens=pb.num_accepted_draft_tokens,
        acceptance_histogram=tuple(pb.acceptance_histogram),
        num_drafter_misses=pb.num_drafter_misses,
        drafter=pb.drafter,
        verification=pb.verification,
        seed=pb.seed,
    )


def model_to_pb(value: ModelInfo) -> control_pb2.ModelInfo:
    return control_pb2.ModelInfo(
        name=value.name,
        vocab_size=value.vocab_size,
        max_positions=value.max_positions,
        eos_ids=value.eos_ids,
        tokenizer_hash=value.tokenizer_hash,
        num_parameters=value.num_parameters,
        supports_trees=value.supports_trees,
        fingerprint=value.fingerprint,
    )


def model_from_pb(pb: control_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=pb.name,
        vocab_size=pb.vocab_size,
        max_positions=pb.max_positions,
        eos_ids=tuple(pb.eos_ids),
        tokenizer_hash=pb.tokenizer_hash,
        num_parameters=pb.num_parameters,
        supports_trees=pb.supports_trees,
        fingerprint=pb.fingerprint,
    )
