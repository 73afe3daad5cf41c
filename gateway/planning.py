"""From the request of a client to the request to a verifier: defaults, limits and tokenisation. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gateway.requests import Chat, GenerateRequest, of_tenant
from gateway.tokenizer import Tokenizer
from rootward.core.requests import (
    MAX_BAD,
    MAX_LOGPROBS,
    DraftMode,
    Rule,
    Speculation,
    Stopping,
    VerifierRequest,
    check_ids,
)
from rootward.errors import ContextLengthExceeded, InvalidRequest
from rootward.ports import ModelInfo

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORD_CHARACTERS = 64
MAX_ID_CHARACTERS = 128
MAX_PREDICTION_CHARACTERS = 1 << 17
# Log-probabilities of the prompts of one answer, those of likely tokens included: each takes about 450 bytes, and a microsecond of the
# event loop.
MAX_PROMPT_LOGPROBS = 1 << 20
# Of all tokens that the outputs of one request may have, counted alike: each takes about 400 bytes.
MAX_OUTPUT_LOGPROBS = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that can be served. `first` is the verifier request of the first attempt; each attempt sets its epoch."""

    request: GenerateRequest
    first: VerifierRequest
    stop_ids: frozenset[int]  # tokens that end this generation
    warnings: tuple[str, ...]


@contextmanager
def refusing() -> Iterator[None]:
    """Turns errors of values that check their ranges into InvalidRequest."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest.from_message(str(error)) from error


def check_name(field: str, value: str) -> None:
    """InvalidRequest for an id that cannot be part of a Redis key: ids are short and printable ASCII, without blanks and braces."""
    if any(not "!" <= c <= "~" or c in "{}" for c in value):
        fix = "has characters beyond printable ASCII without blanks and braces"
        raise InvalidRequest(field, value[:MAX_ID_CHARACTERS], fix)
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidRequest(field, f"{value[:16]}…", f"is longer than {MAX_ID_CHARACTERS} characters")


def without_texts(request: GenerateRequest, tokenizer: Tokenizer) -> GenerateRequest:
    """The request with its bad words and its prediction as tokens."""
    request = _without_bad_words(request, tokenizer)
    if not isinstance(request.prediction, str) or not request.prediction:
        return request
    _check_at_most("prediction", len(request.prediction), MAX_PREDICTION_CHARACTERS, "characters")
    return replace(request, prediction=tokenizer.encode(request.prediction, add_special_tokens=False))


def _without_bad_words(request: GenerateRequest, tokenizer: Tokenizer) -> GenerateRequest:
    """The request with its bad words as token sequences: each as it is tokenised at the beginning of a text and after a blank."""
    if not request.bad_words:
        return request
    _check_at_most("bad_words", len(request.bad_words), MAX_BAD, "words")  # before any of them is tokenised
    sequences = dict.fromkeys(request.sampling.bad_sequences)
    for word in request.bad_words:
        if not 1 <= len(word.strip()) <= MAX_BAD_WORD_CHARACTERS:
            fix = f"is not 1 to {MAX_BAD_WORD_CHARACTERS} characters long, blanks aside"
            raise InvalidRequest("bad_words", word[:16], fix)
        for text in (word.lstrip(), f" {word.lstrip()}"):
            sequences[tokenizer.encode(text, add_special_tokens=False)] = None
    with refusing():
        return replace(request, sampling=replace(request.sampling, bad_sequences=tuple(sequences)))


def make_plan(
    request: GenerateRequest, prompt: tuple[int, ...], model: ModelInfo, *, max_prompt: int = 0, max_output: int = 0
) -> Plan:
    """The plan of a request. InvalidRequest for everything that can be checked before a verifier sees it.

    max_prompt, max_output: the operator's limits in tokens; 0 = no limit."""
    check_name("request_id", request.request_id)
    check_name("session_id", request.session_id)
    _check_at_most("stop", len(request.stop), MAX_STOPS, "strings")
    for stop in request.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", stop[:16], f"is not 1 to {MAX_STOP_CHARACTERS} characters long")
    prompt = _truncated(request, prompt, model)
    # First, so that the tokens of a prompt that is too long are not checked one by one.
    most = _max_tokens(request, len(prompt), model, max_prompt=max_prompt, max_output=max_output)
    if request.resume is not None:
        _check_at_most("resume_tokens", len(request.resume.tokens), most, "tokens, for max_tokens of this request,")
    prediction = () if isinstance(request.prediction, str) else request.prediction  # see `without_texts`
    speculation = request.speculation
    warnings: tuple[str, ...] = ()
    # A seed asks for a reproducible text: coupled drafts, unless the client names a rule or a strategy.
    if request.seed is not None:
        if not any((speculation.rule, speculation.law, speculation.strategy)):
            speculation = replace(speculation, rule=Rule.MATCH, law=DraftMode.COUPLED)
        elif not (request.sampling.greedy or _matches(speculation)):
            warnings = ("seed_not_reproducible",)
    with refusing():
        check_ids("resume_tokens", request.resume.tokens if request.resume else (), model.vocab_size)
        stopping = Stopping(most, request.stop_token_ids, request.ignore_eos, request.min_tokens)
        first = VerifierRequest(
            request_id=of_tenant(request.tenant, request.request_id),
            prompt=prompt,
            sampling=request.sampling,
            stopping=stopping,
            speculation=speculation,
            seed=secrets.randbits(64) if request.seed is None else request.seed,
            structure=request.structure,
            logprobs=request.logprobs,
            choice=request.choice,
            prediction=prediction[: model.max_positions],
            prompt_logprobs=request.prompt_logprobs,
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            priority=request.priority,
            trees=request.trees,
            tenant=request.tenant,
        )
        first.check_tokens(model.vocab_size, model.eos_ids)
    _check_answer(first, request.n)
    stop_ids = frozenset(request.stop_token_ids).union(() if request.ignore_eos else model.eos_ids)
    return Plan(request, first, stop_ids, warnings)


def _truncated(request: GenerateRequest, prompt: tuple[int, ...], model: ModelInfo) -> tuple[int, ...]:
    """The prompt, cut at its beginning to the length that the client asks for."""
    most = request.truncate_prompt
    if most is None:
        return prompt
    if most == -1:
        most = max(1, model.max_positions - max(1, request.max_tokens or 1))  # below 1 it is refused later
    if not 1 <= most < model.max_positions:
        fix = f"is outside [1, {model.max_positions - 1}]; use -1 for as many as fit"
        raise InvalidRequest("truncate_prompt_tokens", most, fix)
    return prompt[-most:]


def _max_tokens(
    request: GenerateRequest, num_prompt: int, model: ModelInfo, *, max_prompt: int, max_output: int
) -> int:
    """The number of tokens that the client asks for, or as many as context, operator and their log-probabilities allow."""
    field = "messages" if isinstance(request.prompt, Chat) else "prompt"
    check_length(field, num_prompt, model)
    if max_prompt and num_prompt > max_prompt:
        raise ContextLengthExceeded(field, num_prompt, f"tokens are more than this server takes, {max_prompt}")
    left = model.max_positions - num_prompt
    requested = left if request.max_tokens is None else request.max_tokens
    if requested > left:
        fix = f"is more than {num_prompt} prompt tokens leave; {_context(model)}, ask for at most {left}"
        raise ContextLengthExceeded("max_tokens", requested, fix)
    if max_output and requested > max_output:
        if request.max_tokens is not None:
            raise ContextLengthExceeded("max_tokens", requested, f"is more than this server gives, {max_output}")
        requested = max_output
    if request.logprobs is None:
        return requested
    # Out of range it is refused later. The share of an output, not what the others leave: its length depends on the request alone.
    num_top, num_outputs = min(max(0, request.logprobs), MAX_LOGPROBS), request.num_prompts * request.n
    most = MAX_OUTPUT_LOGPROBS // ((1 + num_top) * num_outputs)
    if requested > most and request.max_tokens is not None:
        outputs = f" in each of {num_outputs} outputs" if num_outputs > 1 else ""
        fix = (
            f"tokens{outputs}, with {num_top} top log-probabilities each, are too many for one answer; "
            f"ask for at most {most}, or for fewer log-probabilities"
        )
        raise InvalidRequest("max_tokens", requested, fix)
    return min(requested, most)


def _check_answer(first: VerifierRequest, num_choices: int) -> None:
    """InvalidRequest for more than MAX_PROMPT_LOGPROBS of one prompt, which every choice has: before the prefill."""
    most = first.prompt_logprobs
    if most is None:
        return
    num_tokens = len(first.prompt) - 1
    if num_choices * num_tokens * (1 + most) > MAX_PROMPT_LOGPROBS:
        choices = f" in each of {num_choices} choices" if num_choices > 1 else ""
        fix = f"per token are too many for an answer on {num_tokens} tokens{choices}; ask for fewer, or send a shorter prompt"
        raise InvalidRequest("prompt_logprobs", most, fix)


def check_length(field: str, num_prompt: int, model: ModelInfo) -> None:
    if num_prompt >= model.max_positions:
        fix = f"tokens leave no room; {_context(model)}, send at most {model.max_positions - 1}"
        raise ContextLengthExceeded(field, num_prompt, fix)


def _matches(speculation: Speculation) -> bool:
    """Whether its rounds are verified by match, whose tokens follow the seed alone. Without a rule the drafts decide; where the verifier's
    setting may decide what they are, the answer is no."""
    if speculation.rule is not None:
        return speculation.rule is Rule.MATCH
    mode = speculation.law or (speculation.strategy.mode if speculation.strategy is not None else None)
    return mode is not None and not mode.ratio


def _context(model: ModelInfo) -> str:
    """OpenAI's and vLLM's words, by which LiteLLM and others know this error."""
    return f"this model's maximum context length is {model.max_positions} tokens"


def check_resume(request: GenerateRequest) -> None:
    """InvalidRequest for a resumed request without an id or with a wrong offset. Call it before the request gets an id."""
    resume = request.resume
    if resume is None:
        return
    if not request.request_id:
        raise InvalidRequest("request_id", "", "is missing; a request is resumed by its id")
    if resume.offset < 0 or (resume.tokens and len(resume.tokens) != resume.offset):
        fix = "is not the number of tokens received"
        raise InvalidRequest("resume_offset", resume.offset, fix)


def _check_at_most(field: str, number: int, most: int, noun: str) -> None:
    if number > most:
        raise InvalidRequest(field, number, f"{noun} are more than {most}")
