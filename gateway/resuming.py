"""The record of a request, and what a client must send to resume it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

from pydantic import TypeAdapter

from gateway.planning import Plan
from gateway.requests import Resume
from gateway.session_store import Record, Run
from rootward.core.requests import Finish, Rule, TokenLogprob
from rootward.errors import InvalidRequest, Unavailable


class StreamInterrupted(Unavailable):
    """Tokens were sent, and no verifier or gateway can continue after them."""

    reason = "STREAM_INTERRUPTED"


def first_fields(plan: Plan, model: str = "") -> dict[str, str]:
    """The fields of a new record. model: its name on a gateway of several models.

    The digest tells requests apart that share an id. It covers few parameters, so that gateways of two versions agree on it."""
    request, first = plan.request, plan.first
    asked = [request.tenant, first.prompt, first.stopping.max_tokens, request.seed, request.stop]
    if model:
        asked.append(model)
    digest = blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
    return {"digest": digest, "seed": str(first.seed)}


def with_seed(plan: Plan, record: Record) -> Plan:
    """The plan with the seed that was drawn when the request began."""
    seed = record.fields.get("seed")
    return plan if seed is None else replace(plan, first=replace(plan.first, seed=int(seed)))


def beyond_log(plan: Plan, resume: Resume, record: Record) -> Run:
    """The tokens that the client has and the log has not, because its gateway died before it wrote them. The plan has the record's seed.

    InvalidRequest when the two disagree. StreamInterrupted when the client received tokens that are unknown and could not be repeated."""
    log = record.output
    if log and bool(log.logprobs) is (plan.first.logprobs is None):
        fix = "is not what this request began with; resume it with the same parameters"
        raise InvalidRequest("logprobs", plan.first.logprobs, fix)
    num_common = min(len(resume.tokens), len(log))
    if resume.tokens[:num_common] != log.tokens[:num_common]:
        raise InvalidRequest("resume_tokens", "given", "are not the output of this request so far")
    more = resume.tokens[num_common:]
    num_known = len(log) + len(more)
    if plan.first.prompt_logprobs is not None and num_known and not resume.offset:
        # They went with the first chunk and are not in the log. Not StreamInterrupted, after which a client would try again in vain.
        fix = "is before the log-probabilities of the prompt, which are no longer known; send a new request"
        raise InvalidRequest("resume_offset", 0, fix)
    if resume.offset > num_known and not _repeatable(plan, record):
        message = (
            f"{resume.offset} tokens were received and {num_known} are known; send resume_tokens, or a new request"
        )
        raise StreamInterrupted(message, metadata={"emitted": str(resume.offset)})
    # The client has these tokens, so their flags and log-probabilities are never sent.
    logprobs = () if plan.first.logprobs is None else (TokenLogprob(0.0),) * len(more)
    return Run(more, (False,) * len(more), logprobs)


def _repeatable(plan: Plan, record: Record) -> bool:
    """Whether the same tokens come again: the text depends on the target and the seed only, and the seed is that of the beginning."""
    same_seed = plan.request.seed is not None or "seed" in record.fields
    return plan.first.sampling.greedy or (plan.first.speculation.rule is Rule.MATCH and same_seed)


FINISH = TypeAdapter(Finish)


def finish_of(fields: Mapping[str, str]) -> Finish:
    """How a finished request ended."""
    return FINISH.validate_json(fields["finish"])
