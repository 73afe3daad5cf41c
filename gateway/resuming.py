"""Going on with a request that another gateway, or this one, had begun: what of its output is known. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import blake2b

from gateway.planning import Plan
from gateway.requests import Resume
from gateway.sessions import Record, Run
from rootward.core.requests import Finish, FinishReason, Rule, SpeculationStats, TokenLogprob
from rootward.errors import InvalidRequest, Unavailable


class StreamInterrupted(Unavailable):
    """Tokens had been sent, and nobody can continue."""

    reason = "STREAM_INTERRUPTED"


def about(plan: Plan) -> dict[str, str]:
    """What the record of a request says from its beginning. The digest tells requests apart that share an id; few things enter it,
    so that gateways of two versions agree."""
    request, first = plan.request, plan.first
    asked = [request.tenant, first.prompt, first.stopping.max_tokens, request.seed, request.stop]
    digest = blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
    return {"digest": digest, "seed": str(first.seed)}


def with_seed(plan: Plan, record: Record) -> Plan:
    """The plan with the seed that was drawn when the request began."""
    seed = record.fields.get("seed")
    return plan if seed is None else replace(plan, first=replace(plan.first, seed=int(seed)))


def beyond_log(plan: Plan, resume: Resume, record: Record) -> Run:
    """What the client holds and the log does not, because its gateway died before it was written. The plan has the record's seed.

    InvalidRequest when they disagree. StreamInterrupted when more was received than is known and could not be repeated."""
    log = record.output
    if log and bool(log.logprobs) is (plan.first.logprobs is None):
        fix = "is not what this request began with; resume it with the same parameters"
        raise InvalidRequest("logprobs", plan.first.logprobs, fix)
    common = min(len(resume.tokens), len(log))
    if resume.tokens[:common] != log.tokens[:common]:
        raise InvalidRequest("resume_tokens", "given", "are not the output of this request so far")
    more = resume.tokens[common:]
    known = len(log) + len(more)
    if resume.offset > known and not _repeatable(plan, record):
        message = f"{resume.offset} tokens were received and {known} are known; send resume_tokens, or a new request"
        raise StreamInterrupted(message, metadata={"emitted": str(resume.offset)})
    # Neither is ever shown: the client has these tokens.
    logprobs = () if plan.first.logprobs is None else (TokenLogprob(0.0),) * len(more)
    return Run(more, (False,) * len(more), logprobs)


def _repeatable(plan: Plan, record: Record) -> bool:
    """The same tokens come again: the text depends on the target and the seed alone, and the seed is that of the beginning."""
    same_seed = plan.request.seed is not None or "seed" in record.fields
    return plan.first.sampling.greedy or (plan.first.speculation.rule is Rule.MATCH and same_seed)


def finish_to_field(finish: Finish) -> str:
    return json.dumps({"reason": finish.reason.value, "stats": asdict(finish.stats)})


def finish_of(fields: Mapping[str, str]) -> Finish:
    """How a finished request ended."""
    known = json.loads(fields["finish"])
    stats = known["stats"] | {"acceptance_histogram": tuple(known["stats"]["acceptance_histogram"])}
    return Finish(FinishReason(known["reason"]), None, SpeculationStats(**stats))
