"""What the HTTP API answers: the objects of OpenAI's completions API."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gateway.detokenizer import REPLACEMENT
from gateway.requests import Ending, Usage
from gateway.stops import Span
from rootward.core.requests import SpeculationStats
from rootward.ports import ModelInfo

LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM writes the same number


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts that all chunks of one answer share. `decode` gives the text of one token."""

    request_id: str
    model: str
    fingerprint: str
    decode: Callable[[int], str]
    return_token_ids: bool = False
    report_speculation: bool = False
    logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def completion(self, spans: Sequence[Span], ending: Ending) -> dict[str, object]:
        """The whole answer."""
        body = self._body([self._choice(spans, ending)]) | {"usage": usage(ending.usage)}
        if self.report_speculation:
            body["metrics"] = {"speculative_decoding": speculation(ending.stats)}
        return body

    def chunk(self, spans: Sequence[Span], ending: Ending | None, *, text_at: int = 0) -> dict[str, object]:
        """A part of the stream, from character `text_at` on. `usage` is null until the usage chunk."""
        return self._body([self._choice(spans, ending, text_at)]) | {"usage": None}

    def usage_chunk(self, ending: Ending) -> dict[str, object]:
        """The extra chunk that `stream_options.include_usage` asks for."""
        body = self._body([]) | {"usage": usage(ending.usage)}
        if self.report_speculation:
            body["metrics"] = {"speculative_decoding": speculation(ending.stats)}
        return body

    def _body(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
        }

    def _choice(self, spans: Sequence[Span], ending: Ending | None, text_at: int = 0) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            "text": "".join(s.text for s in spans),
            "logprobs": logprobs(spans, text_at, self.decode) if self.logprobs else None,
            "finish_reason": ending.reason.value if ending else None,
            "stop_reason": (ending.stop_string if ending.stop_token_id is None else ending.stop_token_id)
            if ending
            else None,
        }
        if self.return_token_ids:
            choice["token_ids"] = [s.token for s in spans]
            choice["accepted"] = [s.accepted for s in spans]
        return choice


def logprobs(spans: Sequence[Span], text_at: int, decode: Callable[[int], str]) -> dict[str, object]:
    """One entry per token. The emitted token is always among its top ones."""
    given = [(span.token, span.logprob) for span in spans if span.logprob is not None]
    return {
        "tokens": [_name(token, decode) for token, _ in given],
        "token_logprobs": [max(of.logprob, LEAST_LOGPROB) for _, of in given],
        "top_logprobs": [_top([*of.top, (token, of.logprob)], decode) for token, of in given],
        "text_offset": [*accumulate((len(span.text) for span in spans), initial=text_at)][:-1],
    }


def _top(pairs: Sequence[tuple[int, float]], decode: Callable[[int], str]) -> dict[str, float]:
    """Logprob by text. Of two tokens with the same text the later one goes by its id."""
    named: dict[str, tuple[int, float]] = {}
    for token, logprob in pairs:
        name = _name(token, decode)
        if named.get(name, (token, 0.0))[0] != token:
            name = f"token_id:{token}"
        named[name] = token, max(logprob, LEAST_LOGPROB)
    return {name: logprob for name, (_, logprob) in named.items()}


def _name(token: int, decode: Callable[[int], str]) -> str:
    """The text of a token; its id where it holds but a part of a character."""
    text = decode(token)
    return f"token_id:{token}" if REPLACEMENT in text else text


def usage(counts: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def speculation(stats: SpeculationStats) -> dict[str, object]:
    """Names and meanings of vLLM: the acceptance length counts the bonus token."""
    return {
        "num_spec_steps": stats.num_spec_steps,
        "num_plain_steps": stats.num_plain_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "block_efficiency": stats.block_efficiency,
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_drafter_misses": stats.num_drafter_misses,
        "verification": stats.verification,
        "seed": stats.seed,
    }


def model_card(name: str, model: ModelInfo, created: int) -> dict[str, object]:
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
