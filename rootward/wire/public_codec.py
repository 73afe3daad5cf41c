"""generate.proto and control.proto: what the public API and the services between themselves say in the same messages."""

from __future__ import annotations

from collections.abc import Sequence

from rootward.core.requests import FinishReason, Form, Sampling, SpeculationStats, Structure, TokenLogprob
from rootward.ports import LosslessLevel, ModelInfo
from rootward.v1 import control_pb2, generate_pb2
from rootward.wire.columns import pack_f32, pack_u32
from rootward.wire.records import Conversion, Record, numbers_of

REASONS = numbers_of(FinishReason, generate_pb2.Finish.Reason)
LOSSLESS = numbers_of(LosslessLevel, control_pb2.ServerInfo.LosslessLevel)
LEVELS = {number: level for level, number in LOSSLESS.items()}
MODEL = Record(
    ModelInfo,
    control_pb2.ModelInfo,
    lossless=Conversion(
        LOSSLESS.__getitem__, lambda number: LEVELS.get(number, LosslessLevel.DISTRIBUTION)
    ),  # a level of another version is at least the lowest
)
STATS = Record(SpeculationStats, generate_pb2.SpeculationStats)


def stats_to_pb(value: SpeculationStats) -> generate_pb2.SpeculationStats:
    """The counts, and the two ratios that follow from them."""
    drafted = value.num_draft_tokens
    rate = value.num_accepted_draft_tokens / drafted if drafted else 0.0
    return STATS.to_pb(value, mean_acceptance_length=value.mean_acceptance_length, draft_acceptance_rate=rate)


def sampling_to_pb(value: Sampling) -> generate_pb2.Sampling:
    """The part of the processors that `Sampling` carries; the rest is in `decoding_to_pb`."""
    return generate_pb2.Sampling(temperature=value.temperature, top_k=value.top_k, top_p=value.top_p, min_p=value.min_p)


def decoding_to_pb(value: Sampling, structure: Structure | None = None) -> generate_pb2.Decoding:
    """What `sampling_to_pb` leaves out; with the form of the output, if it has one."""
    pb = generate_pb2.Decoding(
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        repetition_penalty=value.repetition_penalty,
        logit_bias=dict(value.logit_bias),
        allowed_token_ids=value.allowed_token_ids,
        bad_sequences=[generate_pb2.TokenIds(ids=run) for run in value.bad_sequences],
    )
    if structure is not None:
        setattr(pb, structure.form.value, structure.text if structure.form is not Form.JSON_OBJECT else True)
    return pb


def sampling_from_pb(sampling: generate_pb2.Sampling, decoding: generate_pb2.Decoding) -> Sampling:
    """Between services, where seed, n and bad words have fields of their own. ValueError where they are set here."""
    if sampling.HasField("seed") or sampling.HasField("n") or decoding.bad_words:
        raise ValueError("sampling: seed, n and bad_words are not carried here; leave them unset")
    return processors_from_pb(sampling, decoding)


def processors_from_pb(sampling: generate_pb2.Sampling, decoding: generate_pb2.Decoding) -> Sampling:
    return Sampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=decoding.repetition_penalty if decoding.HasField("repetition_penalty") else 1.0,
        presence_penalty=decoding.presence_penalty,
        frequency_penalty=decoding.frequency_penalty,
        logit_bias=tuple(decoding.logit_bias.items()),
        allowed_token_ids=tuple(decoding.allowed_token_ids),
        bad_sequences=tuple(tuple(run.ids) for run in decoding.bad_sequences),
    )


def structure_from_pb(decoding: generate_pb2.Decoding) -> Structure | None:
    kind = decoding.WhichOneof("structured_output")
    if kind is None or (kind == "json_object" and not decoding.json_object):
        return None
    return Structure(Form(kind), "" if kind == "json_object" else getattr(decoding, kind))


def logprobs_to_pb(values: Sequence[TokenLogprob]) -> generate_pb2.Logprobs:
    """One entry per token. ValueError unless all have the same number of top tokens."""
    if len({len(value.top) for value in values}) > 1:
        raise ValueError("logprobs: top: lengths differ between tokens; give the same number for each")
    return generate_pb2.Logprobs(
        emitted=pack_f32([value.logprob for value in values]),
        top_token_ids=pack_u32([token for value in values for token, _ in value.top], "logprobs.top_token_ids"),
        top_logprobs=pack_f32([logprob for value in values for _, logprob in value.top]),
    )
