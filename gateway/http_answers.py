"""What the HTTP API answers: OpenAI's objects, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.choices import Tally
from gateway.http_logprobs import Names, of_prompt
from gateway.http_shapes import Choice, Shape, text_of
from gateway.requests import Delta, Ending, Seen, Usage
from gateway.tokenizer import Span
from rootward.core.requests import SpeculationStats
from rootward.ports import ModelInfo

Body = dict[str, object]


@dataclass(slots=True)
class Answer:
    """One answer being told. `echo` writes the prompt in front of the text; `names`: log-probabilities are wanted."""

    shape: Shape
    request_id: str
    model: str
    fingerprint: str
    names: Names | None = None
    prompt_names: Names | None = None  # the same of the prompt
    num_choices: int = 1
    num_outputs: int = 1
    echo: Callable[[tuple[int, ...]], Sequence[Span]] | None = None
    only_echo: bool = False
    return_token_ids: bool = False
    report_speculation: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tree_names: Names | None = None  # the trees of the rounds are wanted
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    tally: Tally = field(default_factory=Tally)
    _told: dict[int, int] = field(default_factory=dict)  # characters sent, by output

    def __post_init__(self) -> None:
        self.tally.num_choices = self.num_choices

    @property
    def tells_prompt(self) -> bool:
        """Token by token, which takes time in its length."""
        return self.echo is not None or self.prompt_names is not None

    def whole(self, spans: Mapping[int, Sequence[Span]]) -> Body:
        """The whole answer, from the spans of every output; their endings are in the tally."""
        choices = []
        for index, ending in sorted(self.tally.endings.items()):
            told = self._with_echo(index, spans[index])
            choice = self.shape.whole(told, ending, names=self.names) | self._of_prompt(index)
            choices.append(self._numbered(index, told, choice))
        return self._body(choices, self.shape.whole_object) | {"usage": self._usage()} | self._metrics()

    def chunks(self, delta: Delta) -> list[Body]:
        """The next chunks of the stream; `usage` is null in them if a chunk of its own will tell it."""
        self.tally.add(delta)
        index, first = delta.index, delta.index not in self._told and not delta.offset
        spans = self._with_echo(index, delta.spans) if first else self._kept(delta.spans)
        at = self._told.get(index, 0)
        self._told[index] = at + len(text_of(spans))
        pieces = self.shape.pieces(spans, delta.ending, text_at=at, first=first, names=self.names)
        tokens = [spans, *[()] * len(pieces)]
        if first and pieces:
            pieces[0] |= self._of_prompt(index)
        choices = [self._numbered(index, own, piece) for own, piece in zip(tokens, pieces, strict=False)]
        if self.tree_names is not None and choices:
            choices[0]["rounds"] = [round_seen(one, self.tree_names) for one in delta.rounds]
        usage = {"usage": self._usage() if self.continuous_usage else None}
        wanted = usage if self.include_usage or self.continuous_usage else {}
        return [self._body([choice], self.shape.chunk_object) | wanted for choice in choices]

    @property
    def single(self) -> bool:
        """A position in the text says where the stream is only if there is one text."""
        return self.num_outputs == 1

    def last(self) -> Body | None:
        """The extra chunk that `stream_options.include_usage` asks for."""
        if not self.include_usage:
            return None
        return self._body([], self.shape.chunk_object) | {"usage": self._usage()} | self._metrics()

    def _kept(self, spans: Sequence[Span]) -> Sequence[Span]:
        return () if self.only_echo else spans

    def _with_echo(self, index: int, spans: Sequence[Span]) -> Sequence[Span]:
        return (*self._echo(index), *self._kept(spans))

    def _echo(self, index: int) -> Sequence[Span]:
        """The prompt, with the log-probabilities of all tokens but the first where they are wanted."""
        if self.echo is None:
            return ()
        echoed, told = self.echo(self.tally.prompts[index]), self.tally.prompt_logprobs[index]
        if self.names is None or not told:  # what a resumed stream was told before is not known any more
            return echoed
        return [*echoed[:1], *(replace(span, logprob=of) for span, of in zip(echoed[1:], told, strict=True))]

    def _body(self, choices: list[Choice], kind: str) -> Body:
        return {
            "id": self.shape.prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
        }

    def _numbered(self, index: int, spans: Sequence[Span], choice: Choice) -> Choice:
        ids = {"token_ids": [s.token for s in spans], "accepted": [s.accepted for s in spans]}
        return {"index": index, **choice, **(ids if self.return_token_ids else {})}

    def _of_prompt(self, index: int) -> Choice:
        """What vLLM tells of the prompt's tokens."""
        if self.prompt_names is None:
            return {}
        told, prompt = self.tally.prompt_logprobs[index], self.tally.prompts[index]
        return {"prompt_logprobs": of_prompt(told, prompt, self.prompt_names)}

    def _usage(self) -> Body:
        counts = self.tally.usage
        return usage(replace(counts, completion_tokens=0) if self.only_echo else counts)

    def _metrics(self) -> Body:
        """Of a single output, as in vLLM."""
        if not self.report_speculation:
            return {}
        ending: Ending | None = self.tally.only
        return {"metrics": None if ending is None else {"speculative_decoding": speculation(ending.stats)}}


def round_seen(one: Seen, names: Names) -> Body:
    """Node i of the tree is entry i - 1 of `nodes`; node 0 is the last token before. The last of `tokens` is the bonus token."""
    tree = one.tree
    nodes = zip(tree.tokens, tree.parents, strict=True) if tree is not None else ()
    return {
        "nodes": [{"token": names[token].text, "parent": parent} for token, parent in nodes],
        "path": [] if tree is None else list(tree.path),
        "tokens": [names[token].text for token in one.tokens],
    }


def usage(counts: Usage) -> Body:
    details = {"reasoning_tokens": 0}
    if counts.predicted is not None:
        accepted, rejected = counts.predicted
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": details,
    }


def speculation(stats: SpeculationStats) -> Body:
    """Names and meanings of vLLM: the acceptance length counts the bonus token."""
    rate = stats.num_accepted_draft_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0
    return {
        "num_spec_steps": stats.num_spec_steps,
        "num_plain_steps": stats.num_plain_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": rate,
        "block_efficiency": stats.block_efficiency,
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_drafter_misses": stats.num_drafter_misses,
        "drafter": stats.drafter,
        "verification": stats.verification,
        "seed": stats.seed,
    }


def model_card(name: str, model: ModelInfo, created: int) -> Body:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rootward",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_positions,
        "rootward": {"tree": model.supports_trees, "verification": ["traversal", "coupled", "token"]},
    }


def fingerprint(model: ModelInfo, version: str) -> str:
    """Same weights, software and promise: same fingerprint."""
    return f"rw-{version}-{model.fingerprint[:12] or 'unknown'}-distribution"
