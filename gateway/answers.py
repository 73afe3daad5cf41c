"""Answers of the HTTP API as plain JSON values: OpenAI's objects, whole and in the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import ClassVar

import orjson

import rootward
from gateway.choices import Tally
from gateway.detokenizer import REPLACEMENT, Output, Span, text_of
from gateway.reasoning import OPEN, ThoughtParser
from gateway.requests import Delta, Ending, GenerateRequest
from gateway.schemas import ChatRequest, GenerationBody
from gateway.service import GatewayService
from gateway.tokenizer import CHARACTERS_PER_TOKEN, Tokenizer
from gateway.tools import CallFormat, CallParser, CallPart
from rootward.client.types import Round
from rootward.core.requests import FinishReason, SpeculationStats, TokenLogprob
from rootward.errors import InvalidRequest
from rootward.ports import ModelInfo

LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM writes the same number
OPENING_TOKENS = 8  # at the end of a prompt, in which an opening tag is looked for

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class TokenName:
    """A token as the text that it adds to a text; a token that is only part of a character is named by its id."""

    text: str
    bytes: list[int] | None


TokenNames = Callable[[int], TokenName]


@lru_cache(1 << 16)
def token_name(tokenizer: Tokenizer, token: int) -> TokenName:
    """The name of a token, cached, because log-probabilities name few tokens many times."""
    text = tokenizer.token_text(token)
    raw = tokenizer.token_bytes(token)
    text = f"token_id:{token}" if REPLACEMENT in text else text
    return TokenName(text, None if raw is None else list(raw))


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer in progress: the state of its stream, and which fields the request asks for."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_in_choices: ClassVar[bool] = (
        True  # where vLLM has token ids and log-probabilities of the prompt; False: beside the choices
    )
    typed_events: ClassVar[bool] = False  # events of the stream are named by their types, and no [DONE] ends them

    service: GatewayService
    body: GenerationBody
    request: GenerateRequest
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    tally: Tally = field(init=False)
    _num_echoed: dict[int, int] = field(default_factory=dict)  # characters of the echoed prompt, by output

    def __post_init__(self) -> None:
        self.tally = Tally(self.request.n, holds_output=not self.body.stream or self.typed_events)

    def names(self, token: int) -> TokenName:
        return token_name(self.service.tokenizer, token)

    def _whole_choice(self, index: int, spans: Sequence[Span], ending: Ending) -> Json:
        """A choice of the whole answer, without its index and token ids."""
        return self._chunk_choices(index, spans, ending, text_at=0, first=True)[0]

    def _chunk_choices(
        self, index: int, spans: Sequence[Span], ending: Ending | None, *, text_at: int, first: bool, some: bool = False
    ) -> list[Json]:
        """The choices of a delta that begins at character `text_at`, one per chunk; the first of them carries the tokens. some: there is
        at least one."""
        raise NotImplementedError

    def size(self, prompts: Iterable[tuple[int, ...]], num_tokens: int, rounds: Sequence[Round] = ()) -> int:
        """Characters whose tokenisation takes about as long as it takes to build an answer with these prompts, if it has them token by
        token, with so many tokens of output, and with these rounds."""
        request, size = self.request, num_tokens
        if request.logprobs is not None:
            size += CHARACTERS_PER_TOKEN * (1 + request.logprobs) * num_tokens
        if self.body.echoes or self.body.prompt_logprobs is not None:
            size += CHARACTERS_PER_TOKEN * (1 + (request.prompt_logprobs or 0)) * sum(map(len, prompts))
        return size + CHARACTERS_PER_TOKEN * sum(len(one.tree_tokens) + len(one.token_ids) for one in rounds)

    @property
    def logprobs(self) -> bool:
        return self.request.logprobs is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of thoughts, in all outputs."""
        return 0

    @property
    def resumable(self) -> bool:
        """A position in the text says where the stream is: there is one text, and all of it is sent as it comes."""
        return self.request.n == 1 and len(self.body.prompts) <= 1

    def whole(self, spans: Mapping[int, Sequence[Span]]) -> Json:
        """The whole answer, from the spans of every output; their endings are in the tally."""
        choices = []
        for index, ending in sorted(self.tally.endings.items()):
            shown = (*self._echo(index), *(() if self.body.only_echoes else spans[index]))
            choice = self._whole_choice(index, shown, ending) | (
                self._of_prompt(index) if self.prompt_in_choices else {}
            )
            choices.append(self._numbered(index, shown, choice))
        beside = {} if self.prompt_in_choices else self._of_prompt(0)
        return self._object(choices, self.whole_object) | {"usage": self._usage()} | beside | self._metrics()

    def chunks(self, delta: Delta) -> list[Json]:
        """The next chunks of the stream; `usage` is null in them if a chunk of its own will have it."""
        self.tally.add(delta)
        index, first, spans = delta.index, False, () if self.body.only_echoes else delta.spans
        if index not in self._num_echoed:
            first, echo = not delta.offset, self._echo(index)  # a resumed stream has had it
            self._num_echoed[index] = len(text_of(echo))
            spans = (*echo, *spans) if first else spans
        at = 0 if first else self._num_echoed[index] + delta.text_offset
        rounds = delta.rounds if self.body.return_trees else ()
        # Rounds come also without text that is final, while a stop string could still match.
        choices = self._chunk_choices(index, spans, delta.ending, text_at=at, first=first, some=bool(rounds))
        beside: list[Json] = [{} for _ in choices]  # fields of each chunk beside its choice
        if first and choices:
            (choices if self.prompt_in_choices else beside)[0] |= self._of_prompt(index)
        tokens = [spans, *[()] * len(choices)]
        choices = [self._numbered(index, own, choice) for own, choice in zip(tokens, choices, strict=False)]
        if self.body.return_trees and choices:
            choices[0]["rounds"] = [round_object(one, self.names) for one in rounds]
        usage: Json = {}
        if (options := self.body.stream_options) and (options.include_usage or options.continuous_usage_stats):
            usage = {"usage": self._usage() if options.continuous_usage_stats else None}
        chunks = zip(choices, beside, strict=True)
        return [self._object([choice], self.chunk_object) | usage | more for choice, more in chunks]

    def last(self) -> Json | None:
        """The chunk with the usage, if `stream_options.include_usage` asks for it."""
        if self.body.stream_options is None or not self.body.stream_options.include_usage:
            return None
        return self._object([], self.chunk_object) | {"usage": self._usage()} | self._metrics()

    async def settled(self, final: Json) -> Json:
        """The whole answer or the last chunk, after the work that must precede its sending."""
        return final

    def named(self, error: Exception) -> Exception:
        """The error, under the name of the field that the gateway made the form of the output from."""
        return error

    def failure(self, error: Json) -> Json:
        """The last chunk of a stream that fails; error: the body of an error response."""
        return error

    def _echo(self, index: int) -> Sequence[Span]:
        """The spans of the prompt if it is echoed; all tokens but the first have log-probabilities if the request asks for them."""
        if not self.body.echoes:
            return ()
        prompt, logprobs = self.tally.prompts[index], self.tally.prompt_logprobs[index]
        output = Output(self.service.tokenizer.detokenizer((), skip_special_tokens=False))
        echoed = [*output.push(prompt, [False] * len(prompt)), *output.finish()]
        if self.logprobs and logprobs:  # a resumed stream has those of its prompt no more
            rest = (replace(span, logprob=of) for span, of in zip(echoed[1:], logprobs, strict=True))
            echoed = [*echoed[:1], *rest]
        return echoed

    def _object(self, choices: list[Json], kind: str) -> Json:
        return {
            "id": self.id_prefix + self.request.request_id,
            "object": kind,
            "created": self.created,
            "model": self.service.served_model,
            "choices": choices,
            "system_fingerprint": fingerprint(self.service.model),
        }

    def _numbered(self, index: int, spans: Sequence[Span], choice: Json) -> Json:
        ids = {"token_ids": [s.token for s in spans], "accepted": [s.accepted for s in spans]}
        return {"index": index, **choice, **(ids if self.body.return_token_ids else {})}

    def _of_prompt(self, index: int) -> Json:
        """vLLM's `prompt_token_ids` and `prompt_logprobs`."""
        prompt = self.tally.prompts[index]
        fields: Json = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(prompt)
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.tally.prompt_logprobs[index], prompt, self.names)
        return fields

    def _usage(self) -> Json:
        counts = self.tally.usage
        if self.body.only_echoes:
            counts = replace(counts, completion_tokens=0)
        details = {"reasoning_tokens": self.num_reasoning_tokens}
        for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
            if (count := getattr(counts, name)) is not None:
                details[name] = count
        return {
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "total_tokens": counts.total_tokens,
            "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
            "completion_tokens_details": details,
        }

    def _metrics(self) -> Json:
        """vLLM's statistics of a single output, if the request has `speculation`."""
        if self.body.speculation is None:
            return {}
        ending = self.tally.only
        return {"metrics": None if ending is None else {"speculative_decoding": speculation_object(ending.stats)}}


class CompletionAnswer(Answer):
    """/v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def _chunk_choices(
        self, index: int, spans: Sequence[Span], ending: Ending | None, *, text_at: int, first: bool, some: bool = False
    ) -> list[Json]:
        logprobs = None
        if self.logprobs:  # as JSON, so that little is left to do in the event loop
            logprobs = orjson.Fragment(orjson.dumps(completion_logprobs(spans, text_at, self.names)))
        return [{"text": text_of(spans), "logprobs": logprobs, **finish(ending)}]


@dataclass(slots=True, kw_only=True)
class ChatAnswer(Answer):
    """/v1/chat/completions. The first chunk has the role, the last one the finish reason and nothing else. A tool call is a chunk with its
    id and name, then chunks with pieces of its arguments."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompt_in_choices = False

    body: ChatRequest
    call_format: CallFormat | None  # None: there are no calls
    reasoning: bool  # thoughts in tags are separated from the text
    _parsers: dict[int, CallParser] = field(default_factory=dict)  # by output
    _thoughts: dict[int, ThoughtParser] = field(default_factory=dict)  # by output

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(thoughts.num_tokens for thoughts in self._thoughts.values())

    @property
    def resumable(self) -> bool:
        return self.request.n == 1 and self.call_format is None and not self.reasoning

    def named(self, error: Exception) -> Exception:
        structure = None if self.call_format is None else self.request.structure
        if structure and isinstance(error, InvalidRequest) and error.field == structure.form.value:
            return type(error)("tools", "given", error.fix)
        return error

    def _whole_choice(self, index: int, spans: Sequence[Span], ending: Ending) -> Json:
        reasoning, parts = self._parts(index, spans, ended=True)
        text, functions = "", list[dict[str, str]]()
        for part in parts:
            if isinstance(part, str):
                text += part
            elif part.name:
                functions.append({"name": part.name, "arguments": ""})
            else:
                functions[-1]["arguments"] += part.arguments
        calls = [{"id": call_id(), "type": "function", "function": function} for function in functions]
        content = None if calls and not text else text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        message |= thoughts_of(reasoning)
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._logprobs(spans), **self._finish(index, ending)}

    def _chunk_choices(
        self, index: int, spans: Sequence[Span], ending: Ending | None, *, text_at: int, first: bool, some: bool = False
    ) -> list[Json]:
        reasoning, parts = self._parts(index, spans, ended=ending is not None)
        deltas: list[Json] = [thoughts_of(reasoning)] if reasoning else []
        deltas += [{"content": part} if isinstance(part, str) else {"tool_calls": [call_delta(part)]} for part in parts]
        details = self.logprobs or self.body.return_token_ids
        unparsed = self.call_format is None and not self.reasoning
        if not deltas and (first or some or (spans and (details or unparsed))):
            deltas = [{"content": ""}]
        if first:
            deltas[0] = {"role": "assistant", **deltas[0]}
        choices: list[Json] = [{"delta": delta, "logprobs": None, **finish(None)} for delta in deltas]
        if choices:
            choices[0]["logprobs"] = self._logprobs(spans)
        if ending is not None:
            choices.append({"delta": {}, "logprobs": None, **self._finish(index, ending)})
        return choices

    def _parts(self, index: int, spans: Sequence[Span], *, ended: bool) -> tuple[str, list[str | CallPart]]:
        """(thoughts, texts and pieces of calls) that are final after these spans."""
        reasoning, text = self._without_thoughts(index, spans, ended=ended)
        if self.call_format is None:
            return reasoning, [text] if text else []
        if index not in self._parsers:
            self._parsers[index] = CallParser(
                self.call_format,
                names=[tool.function.name for tool in self.body.tools],
                function=self.body.function,
                forced=self.body.forces_calls,
                parallel=self.body.parallel_tool_calls,
            )
        parser = self._parsers[index]
        return reasoning, [*parser.push(text), *(parser.finish() if ended else ())]

    def _without_thoughts(self, index: int, spans: Sequence[Span], *, ended: bool) -> tuple[str, str]:
        """(thoughts, the rest of the text) that are final after these spans."""
        if not self.reasoning:
            return "", text_of(spans)
        if index not in self._thoughts:
            end = "".join(self.names(token).text for token in self.tally.prompts[index][-OPENING_TOKENS:])
            self._thoughts[index] = ThoughtParser(opened=end.rstrip().endswith(OPEN))
        parser = self._thoughts[index]
        pieces = [parser.push(span.text) for span in spans]
        if ended:
            pieces.append(parser.finish())
        return "".join(thoughts for thoughts, _ in pieces), "".join(text for _, text in pieces)

    def _finish(self, index: int, ending: Ending) -> Json:
        """OpenAI's "tool_calls" is the reason of calls that the model chose."""
        called = index in self._parsers and self._parsers[index].num_calls > 0
        chosen = called and not self.body.function and ending.reason is FinishReason.STOP
        return finish(ending) | ({"finish_reason": "tool_calls"} if chosen else {})

    def _logprobs(self, spans: Sequence[Span]) -> Json | None:
        return {"content": token_logprobs(spans, self.names), "refusal": None} if self.logprobs else None


def thoughts_of(reasoning: str) -> Json:
    """The fields of thoughts: DeepSeek's, SGLang's and llama.cpp's name, and vLLM's and OpenRouter's."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def call_id() -> str:
    """A new id of nine letters and digits, which the templates of all models accept."""
    return uuid.uuid4().hex[:9]


def call_delta(part: CallPart) -> Json:
    """A piece of a call in a stream of chats."""
    beginning: Json = {"id": call_id(), "type": "function"} if part.name else {}
    function = {**({"name": part.name} if part.name else {}), "arguments": part.arguments}
    return {"index": part.index, **beginning, "function": function}


def finish(ending: Ending | None) -> Json:
    """`stop_reason` is vLLM's: the stop string or token of the client that ended it."""
    if ending is None:
        return {"finish_reason": None, "stop_reason": None}
    stop = ending.stop_string if ending.stop_token_id is None else ending.stop_token_id
    return {"finish_reason": ending.reason.value, "stop_reason": stop}


def round_object(one: Round, names: TokenNames) -> Json:
    """Node i of the tree is entry i - 1 of `nodes`; node 0 is the last token before. The last of `tokens` is the bonus token."""
    nodes = zip(one.tree_tokens, one.tree_parents, strict=True)
    return {
        "nodes": [{"token": names(token).text, "parent": parent} for token, parent in nodes],
        "path": list(one.path),
        "tokens": [names(token).text for token in one.token_ids],
    }


def speculation_object(stats: SpeculationStats) -> Json:
    """Names and meanings of vLLM: the acceptance length counts the bonus token."""
    return asdict(stats) | {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "block_efficiency": stats.block_efficiency,
    }


def fingerprint(model: ModelInfo) -> str:
    """OpenAI's `system_fingerprint`: equal for equal weights, versions of Rootward and lossless levels."""
    return f"rw-{rootward.__version__}-{model.fingerprint[:12] or 'unknown'}-{model.lossless}"


# -- Log-probabilities --------------------------------------------------------------------------------------------------


def completion_logprobs(spans: Sequence[Span], text_at: int, names: TokenNames) -> Json:
    """One entry per token, null for one without (the first token of an echoed prompt). The emitted token is always among the top ones."""
    return {
        "tokens": [_names_at(span, names)(span.token).text for span in spans],
        "token_logprobs": [None if s.logprob is None else _number(s.logprob.logprob) for s in spans],
        "top_logprobs": [
            None if s.logprob is None else _top_by_text(s.token, s.logprob, _names_at(s, names)) for s in spans
        ],
        "text_offset": [*accumulate((len(span.text) for span in spans), initial=text_at)][:-1],
    }


def token_logprobs(spans: Sequence[Span], names: TokenNames) -> list[orjson.Fragment]:
    """One entry per token that has a log-probability, as JSON: millions of objects would take four times the memory, and the interpreter
    would stop all threads to look through them."""
    content = []
    for span in spans:
        if span.logprob is not None:
            named = _names_at(span, names)
            top = [_entry(token, logprob, named) for token, logprob in span.logprob.top]
            entry = _entry(span.token, span.logprob.logprob, named) | {"top_logprobs": top}
            content.append(orjson.Fragment(orjson.dumps(entry)))
    return content


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob], prompt: Sequence[int], names: TokenNames
) -> list[orjson.Fragment | None]:
    """vLLM's form: one object by token ids per prompt token, null for the first; as JSON, like `token_logprobs`."""
    entries: list[orjson.Fragment | None] = [None]
    for token, of in zip(prompt[1:], logprobs, strict=False):
        pairs = {**dict(of.top), token: of.logprob}
        entry = {str(t): {"logprob": _number(p), "decoded_token": names(t).text} for t, p in pairs.items()}
        entries.append(orjson.Fragment(orjson.dumps(entry)))
    return entries


def _names_at(span: Span, names: TokenNames) -> TokenNames:
    """The names of tokens at the place of this one: the first token of a text without a prompt has lost its blank, as any other would."""
    return partial(_without_blank, names) if names(span.token).text == f" {span.text}" else names


def _without_blank(names: TokenNames, token: int) -> TokenName:
    name = names(token)
    if not name.text.startswith(" "):
        return name
    return TokenName(name.text[1:], None if name.bytes is None else name.bytes[1:])


def _top_by_text(token: int, of: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """Log-probabilities by text. The second of two tokens with the same text is named by its id."""
    seen: dict[str, tuple[int, float]] = {}
    for candidate, logprob in [*of.top, (token, of.logprob)]:
        text = names(candidate).text
        if seen.get(text, (candidate, 0.0))[0] != candidate:
            text = f"token_id:{candidate}"
        seen[text] = candidate, _number(logprob)
    return {text: logprob for text, (_, logprob) in seen.items()}


def _entry(token: int, logprob: float, names: TokenNames) -> Json:
    name = names(token)
    return {"token": name.text, "logprob": _number(logprob), "bytes": name.bytes}


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
