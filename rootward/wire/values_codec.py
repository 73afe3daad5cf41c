"""`rootward.values` ↔ the messages of control.proto and generate.proto that services and the SDK share."""

from __future__ import annotations

from collections.abc import Sequence

from rootward.v1 import control_pb2, generate_pb2
from rootward.values import LosslessLevel, ModelInfo, SpeculationStats, TokenLogprob
from rootward.wire.columns import pack_f32, pack_u32, unpack_f32, unpack_u32
from rootward.wire.records import Conversion, Record, numbers_of

_NUMBERS = numbers_of(LosslessLevel, control_pb2.ServerInfo.LosslessLevel)
_LEVELS = {number: level for level, number in _NUMBERS.items()}
MODEL = Record(
    ModelInfo,
    control_pb2.ModelInfo,
    # A level of another version is at least the lowest.
    lossless=Conversion(_NUMBERS.__getitem__, lambda number: _LEVELS.get(number, LosslessLevel.DISTRIBUTION)),
)
STATS = Record(SpeculationStats, generate_pb2.SpeculationStats)


def stats_to_pb(value: SpeculationStats) -> generate_pb2.SpeculationStats:
    """The counts, and the two ratios that follow from them."""
    return STATS.to_pb(
        value, mean_acceptance_length=value.mean_acceptance_length, draft_acceptance_rate=value.draft_acceptance_rate
    )


def logprobs_to_pb(values: Sequence[TokenLogprob]) -> generate_pb2.Logprobs:
    """One entry per token. ValueError unless all have the same number of top tokens."""
    if len({len(value.top) for value in values}) > 1:
        raise ValueError("logprobs: top: lengths differ between tokens; give the same number for each")
    return generate_pb2.Logprobs(
        emitted=pack_f32([value.logprob for value in values]),
        top_token_ids=pack_u32([token for value in values for token, _ in value.top], "logprobs.top_token_ids"),
        top_logprobs=pack_f32([logprob for value in values for _, logprob in value.top]),
    )


def unpack_logprobs(pb: generate_pb2.Logprobs, num_tokens: int | None = None) -> tuple[TokenLogprob, ...]:
    """One entry per token. ValueError if the columns do not fit `num_tokens` (None: as many as they have)."""
    emitted = unpack_f32(pb.emitted, "logprobs.emitted")
    ids = unpack_u32(pb.top_token_ids, "logprobs.top_token_ids")
    top = unpack_f32(pb.top_logprobs, "logprobs.top_logprobs")
    num = len(emitted) if num_tokens is None else num_tokens
    k, rest = divmod(len(ids), num) if num else (0, len(ids))
    if len(emitted) != num or len(top) != len(ids) or rest:
        counts = f"{len(emitted)}, {len(ids)} and {len(top)} entries for {num} tokens"
        raise ValueError(f"logprobs: {counts}; send one per token, and of the top tokens k per token")
    pairs = list(zip(ids, top, strict=True))
    return tuple(TokenLogprob(logprob, tuple(pairs[i * k : (i + 1) * k])) for i, logprob in enumerate(emitted))
