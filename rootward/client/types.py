"""Arguments and results of the SDK: frozen values, no protobuf in any signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from rootward.values import ModelInfo
from rootward.values import SpeculationStats as SpeculationStats
from rootward.values import TokenLogprob as TokenLogprob

Prompt = str | Sequence[int]  # text or token ids
Messages = Sequence[Mapping[str, Any]]  # of a conversation: role, content (a text, or text parts), and perhaps name


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. None and empty values leave the choice to the server."""

    temperature: float | None = None  # 0 decodes greedily; default 1
    top_p: float | None = None  # in (0, 1]; default 1 (off)
    top_k: int = 0  # 0 keeps every token
    max_tokens: int | None = None  # default: what is left of the context
    seed: int | None = None  # given: the text can be repeated
    stop: str | Sequence[str] = ()  # the text ends before the first one found
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the matched stop string in the text
    skip_special_tokens: bool = True
    min_p: float = 0.0  # least probability relative to the most likely token, in [0, 1]; 0 keeps every token
    repetition_penalty: float | None = None  # in (0, 100], for tokens of prompt and text; default 1 (off)
    presence_penalty: float = 0.0  # in [-2, 2], for tokens of the text
    frequency_penalty: float = 0.0  # in [-2, 2], once for each time the text has the token
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the score of a token, in [-100, 100]
    allowed_token_ids: Sequence[int] = ()  # empty: every token
    bad_words: Sequence[str] = ()  # texts that must not occur, as they are tokenised alone or after a blank
    min_tokens: int = 0  # no stop of any kind before this many
    n: int = 1  # independent choices; with a seed, more of them begin with the same ones
    logprobs: int | None = None  # k: log-probability of each token, and of the k most likely ones; at most 20
    prompt_logprobs: int | None = None  # the same of the prompt
    # The form of the whole text; at most one of them.
    json_object: bool = False
    json_schema: str | Mapping[str, object] | None = None
    regex: str | None = None
    grammar: str | None = None  # Lark


@dataclass(frozen=True, slots=True)
class Speculation:
    """Control of speculation for one request. None leaves the choice to the server."""

    mode: str = "auto"  # "auto", "disabled" or "required"
    verification: str | None = None  # "traversal", "coupled", "token", "block" or "multi_step"
    max_depth: int | None = None  # longest drafted path
    topk: int | None = None  # most children per node
    num_draft_tokens: int | None = None  # nodes per round
    drafter: str | None = None  # a pool of drafters of the server, or "ngram"
    prediction: str | None = None  # the text you expect, one more source of drafts; changes speed, not the text
    draft_strategy: str | None = None  # trees to draft: NAME or NAME:N1,N2,...


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. Either a prompt or `messages` is given."""

    messages: Messages | None  # go through the model's chat template
    sampling: SamplingParams | None
    speculation: Speculation | str | bool | None  # a mode is enough; False disables it
    model: str  # served name; "": the only one
    request_id: str  # idempotency key; "": a random one
    session_id: str  # turns of one conversation: their KV is found again
    priority: int  # lower runs earlier
    cache_salt: str  # prompts with different ones never share cached prefixes
    return_trees: bool  # the tree of every round, in `TokenDelta.rounds` and `GenerationResult.rounds`


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of all choices
    cached_tokens: int = 0  # of the prompt, whose KV was there already
    accepted_prediction_tokens: int | None = None  # of a prediction, those that the text has
    rejected_prediction_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds, measured by the gateway."""

    queue_ms: float = 0.0  # arrival to dispatch
    ttft_ms: float = 0.0  # arrival to first token
    decode_ms: float = 0.0  # first token to last token
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """A pass of the target. Node i of its tree is entry i - 1 of `tree_tokens` and `tree_parents`; node 0 is the last token before."""

    token_ids: tuple[int, ...]  # committed: the accepted path, then the bonus token
    tree_tokens: tuple[int, ...] = ()  # empty: there was no tree
    tree_parents: tuple[int, ...] = ()  # each below its node
    path: tuple[int, ...] = ()  # nodes that were accepted, from the root on


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """A run of tokens that became final."""

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]  # per token: an accepted draft token (else a bonus token)
    index: int = 0  # of the choice
    offset: int = 0  # output position of the first token
    spans: tuple[tuple[str, bool], ...] = ()  # per token: the text it added, and `accepted`
    logprobs: tuple[TokenLogprob, ...] = ()  # per token, where they were asked for
    rounds: tuple[Round, ...] = ()  # whose tokens became known since the delta before, where trees were asked for


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A whole generation. `stop` is the stop string or token id that ended it, if one did.

    Of several choices (`SamplingParams.n`) it is the first; `choices` has them all. `usage` counts all of them.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    finish_reason: str  # "stop", "length", "aborted"; "cancelled" when this client ended it
    stop: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    timing: Timing = field(default_factory=Timing)
    request_id: str = ""
    warnings: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # per token, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of every prompt token but the first, where they were asked for
    index: int = 0  # of this choice
    rounds: tuple[Round, ...] = field(default=(), repr=False)  # where trees were asked for
    choices: tuple[GenerationResult, ...] = field(default=(), repr=False)
    # The last protobuf message, for what is not lifted out.
    raw: object = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    address: str
    model: str
    ready: bool
    draining: bool


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    role: str
    worker: str
    models: tuple[ModelInfo, ...] = ()
    verifiers: tuple[Worker, ...] = ()
    drafters: tuple[Worker, ...] = ()
    features: tuple[str, ...] = ()
    uptime_s: float = 0.0
    clock_s: float = 0.0  # seconds since 1970 on its clock


@dataclass(frozen=True, slots=True)
class VerifierLoad:
    name: str
    ready: bool
    num_running: int
    num_waiting: int
    max_sessions: int
    stats: Mapping[str, float] = field(default_factory=dict)  # gauges, as its metrics have them

    @property
    def speedup(self) -> float | None:
        """Measured speed of trees over plain decoding; None before both were measured."""
        return self.stats.get("spec_decode_speedup_estimate") or None

    def of_drafters(self, name: str) -> dict[str, float]:
        """A gauge that the verifier has of each drafter, by the address of the drafter."""
        return {key.removeprefix(f"{name}/"): value for key, value in self.stats.items() if key.startswith(f"{name}/")}


@dataclass(frozen=True, slots=True)
class Load:
    """Counts are since the gateway started: a rate is the difference of two of these."""

    num_running: int
    num_waiting: int
    max_sessions: int
    draining: bool
    num_requests: int = 0  # ended, whole
    num_tokens: int = 0  # delivered to clients
    num_rounds: int = 0  # bonus tokens among them
    uptime_s: float = 0.0
    verifiers: tuple[VerifierLoad, ...] = ()

    @property
    def caught_drafters(self) -> list[str]:
        """Addresses of drafters that the audit of a verifier has caught."""
        return sorted({address for verifier in self.verifiers for address in verifier.of_drafters("drafter_caught")})


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """An event of a request. Fields by `kind`:

    begun: num_prompt_tokens, num_tokens known of its output · sent: verifier, epoch ·
    round: offset, num_tokens, num_accepted of them · ended: num_tokens, finish_reason ("" = failed or left), error
    """

    kind: str
    request_id: str
    session_id: str
    tenant: str
    elapsed_s: float  # since the request arrived
    num_missed: int = 0  # events before this one for which the caller was too slow
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    offset: int = 0  # output position of the first token
    verifier: str = ""
    epoch: int = 0
    finish_reason: str = ""
    error: str = ""  # reason of the failure
