"""What the HTTP API answers: the objects of OpenAI's completions API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.requests import Ending, Usage
from gateway.stops import Span
from rootward.core.requests import SpeculationStats
from rootward.ports import ModelInfo


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts that all chunks of one answer share."""

    request_id: str
    model: str
    fingerprint: str
    return_token_ids: bool = False
    report_speculation: bool = False
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def completion(self, spans: Sequence[Span], ending: Ending) -> dict[str, object]:
        """The whole answer."""
        body = self._body([self._choice(spans, ending)]) | {"usage": usage(ending.usage)}
        if self.report_speculation:
            body["metrics"] = {"speculative_decoding": speculation(ending.stats)}
        return body

    def chunk(self, spans: Sequence[Span], ending: Ending | None) -> dict[str, object]:
        """A part of the stream. `usage` is null until the usage chunk."""
        return self._body([self._choice(spans, ending)]) | {"usage": None}

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

    def _choice(self, spans: Sequence[Span], ending: Ending | None) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            "text": "".join(s.text for s in spans),
            "logprobs": None,
            "finish_reason": ending.reason.value if ending else None,
            "stop_reason": (ending.stop_string if ending.stop_token_id is None else ending.stop_token_id)
            if ending
            else None,
        }
        if self.return_token_ids:
            choice["token_ids"] = [s.token for s in spans]
            choice["accepted"] = [s.accepted for s in spans]
        return choice


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
