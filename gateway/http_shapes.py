"""The two shapes of an answer: text completions and chats. Each makes the choices of a whole answer and of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.http_logprobs import Names, of_chat, of_completion
from gateway.requests import Ending
from gateway.tokenizer import Span

Choice = dict[str, object]


class Shape(Protocol):
    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def whole(self, spans: Sequence[Span], ending: Ending, *, names: Names | None) -> Choice:
        """A choice of the whole answer, its index and token ids left out. `names`: log-probabilities are wanted."""

    def pieces(
        self, spans: Sequence[Span], ending: Ending | None, *, text_at: int, first: bool, names: Names | None
    ) -> list[Choice]:
        """The chunks of a delta that begins at character `text_at` of its text; the first of them carries the tokens."""


class TextShape:
    """/v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def whole(self, spans: Sequence[Span], ending: Ending, *, names: Names | None) -> Choice:
        return self.pieces(spans, ending, text_at=0, first=True, names=names)[0]

    def pieces(
        self, spans: Sequence[Span], ending: Ending | None, *, text_at: int, first: bool, names: Names | None
    ) -> list[Choice]:
        logprobs = of_completion(spans, text_at, names) if names is not None else None
        return [{"text": text_of(spans), "logprobs": logprobs, **finish(ending)}]


class ChatShape:
    """/v1/chat/completions. The first chunk tells the role, the last one how it ended and nothing else."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, spans: Sequence[Span], ending: Ending, *, names: Names | None) -> Choice:
        message = {"role": "assistant", "content": text_of(spans), "refusal": None}
        return {"message": message, "logprobs": self._logprobs(spans, names), **finish(ending)}

    def pieces(
        self, spans: Sequence[Span], ending: Ending | None, *, text_at: int, first: bool, names: Names | None
    ) -> list[Choice]:
        role = {"role": "assistant"} if first else {}
        delta = {**role, "content": text_of(spans)}
        made: list[Choice] = []
        if spans or first:
            made.append({"delta": delta, "logprobs": self._logprobs(spans, names), **finish(None)})
        if ending is not None:
            made.append({"delta": {}, "logprobs": None, **finish(ending)})
        return made

    @staticmethod
    def _logprobs(spans: Sequence[Span], names: Names | None) -> dict[str, object] | None:
        return of_chat(spans, names) if names is not None else None


def text_of(spans: Sequence[Span]) -> str:
    return "".join(span.text for span in spans)


def finish(ending: Ending | None) -> Choice:
    """`stop_reason` is vLLM's: the stop string or token of the client that ended it."""
    if ending is None:
        return {"finish_reason": None, "stop_reason": None}
    stop = ending.stop_string if ending.stop_token_id is None else ending.stop_token_id
    return {"finish_reason": ending.reason.value, "stop_reason": stop}
