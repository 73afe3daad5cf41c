"""generate.proto: the processors of a request and the reason of its end, in the public API and between services."""

from __future__ import annotations

from google.protobuf.message import Message

from rootward.core.requests import MAX_BAD, MAX_BIASES, FinishReason, Form, Sampling, Structure
from rootward.v1 import generate_pb2
from rootward.wire.records import numbers_of

REASONS = numbers_of(FinishReason, generate_pb2.Finish.Reason)


def processors_to_pb(value: Sampling, structure: Structure | None = None) -> dict[str, Message]:
    """The fields `sampling` and `decoding` of a message. structure: the form of the output, if it has one."""
    sampling = generate_pb2.Sampling(
        temperature=value.temperature, top_k=value.top_k, top_p=value.top_p, min_p=value.min_p
    )
    decoding = generate_pb2.Decoding(
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        repetition_penalty=value.repetition_penalty,
        logit_bias=dict(value.logit_bias),
        allowed_token_ids=value.allowed_token_ids,
        bad_sequences=[generate_pb2.TokenIds(ids=run) for run in value.bad_sequences],
    )
    if structure is not None:
        setattr(decoding, structure.form.value, structure.text if structure.form is not Form.JSON_OBJECT else True)
    return {"sampling": sampling, "decoding": decoding}


def sampling_from_pb(sampling: generate_pb2.Sampling, decoding: generate_pb2.Decoding) -> Sampling:
    """Between services, where seed, n and bad words have fields of their own. ValueError where they are set here."""
    if sampling.HasField("seed") or sampling.HasField("n") or decoding.bad_words:
        raise ValueError("sampling: seed, n and bad_words are not carried here; leave them unset")
    return processors_from_pb(sampling, decoding)


def processors_from_pb(sampling: generate_pb2.Sampling, decoding: generate_pb2.Decoding) -> Sampling:
    for name, given, most in (
        ("logit_bias", len(decoding.logit_bias), MAX_BIASES),
        ("bad_words", len(decoding.bad_sequences), MAX_BAD),
    ):
        if given > most:  # before each of them is converted
            raise ValueError(f"{name}: {given} are more than {most}; send fewer")
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
