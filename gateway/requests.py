"""Requests of clients and the deltas of their answers. gRPC (servicer.py) and HTTP (schemas.py, answers.py) convert from and to these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from gateway.detokenizer import Span, text_of
from rootward.client.types import Round, Timing, Usage
from rootward.core.requests import (
    DraftMode,
    DraftStrategy,
    FinishReason,
    Rule,
    Sampling,
    Speculation,
    SpeculationMode,
    SpeculationStats,
    Structure,
    TokenLogprob,
)

# Name of a verification in requests -> the rule, and the draft mode that it needs.
VERIFICATIONS: dict[str, tuple[Rule, DraftMode | None]] = {
    "traversal": (Rule.TRAVERSAL, None),
    "coupled": (Rule.MATCH, DraftMode.COUPLED),
    "token": (Rule.TOKEN, None),
    "block": (Rule.BLOCK, None),
    "multi_step": (Rule.MULTI_STEP, None),
}


def speculation_of(
    mode: str,
    verification: str | None,
    draft_strategy: str | None,
    *,
    num_draft_tokens: int | None = None,
    max_depth: int | None = None,
    topk: int | None = None,
    drafter: str = "",
) -> Speculation:
    """The speculation that a request asks for by names. ValueError, with the path of the field, for values that cannot be."""
    rule, draft_mode = VERIFICATIONS[verification] if verification else (None, None)
    try:
        return Speculation(
            SpeculationMode(mode),
            rule,
            draft_mode,
            num_draft_tokens=num_draft_tokens,
            max_depth=max_depth,
            topk=topk,
            drafter=drafter,
            strategy=None if draft_strategy is None else DraftStrategy.parse(draft_strategy),
        )
    except ValueError as error:
        raise ValueError(f"speculation.{error}") from error


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered with the model's chat template."""

    messages: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue a request that is known by its id, whichever gateway drives it now. Deltas begin at output position `offset`."""

    offset: int = 0
    tokens: tuple[int, ...] = ()  # that the client has received, if it sends them: the record may then have fewer


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. The prompt is a text, token ids or a conversation; defaults are the documented ones."""

    prompt: str | tuple[int, ...] | Chat
    request_id: str = ""  # "" = the gateway makes one
    model: str = ""  # "" = the model served
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # None = the rest of the context
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # the matched stop string stays in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # None = drawn; given = the text is reproducible (coupled, unless a rule is named)
    speculation: Speculation = field(default_factory=Speculation)
    session_id: str = ""
    deadline_s: float | None = None  # seconds from now
    min_tokens: int = 0  # no stop of any kind before this many
    structure: Structure | None = None
    bad_words: tuple[str, ...] = ()  # texts that the output must not have
    logprobs: int | None = None  # None = none; k = of each token and of the k most likely ones
    prompt_logprobs: int | None = None  # the same of the prompt
    prediction: str | tuple[int, ...] = ""  # the output that the client expects
    cache_salt: str = ""  # prompts with different salts never share cached prefixes
    traceparent: str = ""  # W3C trace context of the client; "" = none
    n: int = 1  # choices that the client asks for; this is one of them, see choices.py
    choice: int = 0  # its number; its random numbers are those of (seed, choice)
    index: int = 0  # of this output among all outputs of the client's request
    num_prompts: int = 1  # of the client's request, with n choices each
    priority: int = 0  # lower runs earlier
    add_special_tokens: bool | None = None  # around a text prompt; None = as the gateway is set
    trees: bool = False  # show the tree of every round
    truncate_prompt: int | None = None  # number of last tokens of the prompt to keep; -1 = as many as fit
    tenant: str = ""  # of the caller
    resume: Resume | None = None
    prompt_ids: tuple[int, ...] | None = field(default=None, repr=False)  # of the prompt, if it is tokenised already


@dataclass(frozen=True, slots=True)
class Ending:
    """How a generation ended. At most one of the three stops is set."""

    reason: FinishReason
    usage: Usage
    stats: SpeculationStats
    timing: Timing
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Spans that became final. `offset` is the output position of the first, `text_offset` that of its text in characters; the last delta
    carries `ending`."""

    request_id: str
    offset: int
    spans: tuple[Span, ...] = ()
    ending: Ending | None = None
    index: int = 0  # of the output, where a request has several
    prompt: tuple[int, ...] = field(default=(), repr=False)  # on every delta, as are its log-probabilities
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of every prompt token but the first, if the request asks for them
    rounds: tuple[Round, ...] = ()  # if the request asks for them
    text_offset: int = 0

    def since(self, position: int) -> Delta:
        """The delta without the spans before this output position."""
        skip = min(max(0, position - self.offset), len(self.spans))
        if not skip:
            return self
        text_offset = self.text_offset + len(text_of(self.spans[:skip]))
        return replace(self, offset=self.offset + skip, spans=self.spans[skip:], text_offset=text_offset)


def of_tenant(tenant: str, name: str) -> str:
    """The name of a tenant's id in the gateway, the store and at verifiers. Neither part can hold the blank between them."""
    return f"{quote(tenant, safe='')} {name}" if tenant else name


def as_chosen(name: str) -> str:
    """The id that the client chose, of a name made by `of_tenant`."""
    return name.rpartition(" ")[2]
