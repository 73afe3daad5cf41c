"""Answers of /v1/responses: a chat's thoughts, text and calls as OpenAI's output items, whole and as events of a stream.

Both come from the same steps: an answer that is not streamed is the response in the last event of a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from orjson import Fragment

from gateway.answers import ChatAnswer, Json, call_id, token_logprobs
from gateway.detokenizer import Span
from gateway.requests import Delta, Ending
from gateway.response_schemas import ResponseRequest, items_of, messages_of
from gateway.schemas import Message
from gateway.stored_responses import ID_PREFIX, StoredResponse
from rootward.core.requests import FinishReason

Kind: TypeAlias = Literal["message", "reasoning", "function_call"]

ID_PREFIXES: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}

# Why an answer is incomplete. An abort is the operator's or the client's; OpenAI's server has no such reason.
INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORTED: "aborted"}


@dataclass(slots=True, kw_only=True)
class ResponseAnswer(ChatAnswer):
    """One answer in progress."""

    id_prefix = ID_PREFIX
    typed_events = True

    wanted: ResponseRequest
    messages: list[Message]  # of the conversation before it
    keep: Callable[[str, StoredResponse], Awaitable[bool]]  # under its id
    _output: list[Json] = field(default_factory=list)  # items; the last one may still grow
    _growing: Kind | None = None  # type of the last item, if it grows
    _text: list[str] = field(default_factory=list)  # of the growing item, in pieces
    _text_logprobs: list[Fragment] = field(default_factory=list)  # of the growing item
    _held_logprobs: list[Fragment] = field(default_factory=list)  # of tokens whose text is held back, and of thoughts
    _num_taken: int = 0  # log-probabilities that are no longer held
    _events: list[Json] = field(default_factory=list)  # that the next `chunks` returns
    _num_events: int = 0

    @property
    def resumable(self) -> bool:
        return False

    def whole(self, spans: Mapping[int, Sequence[Span]]) -> Json:
        self._grow(spans[0], self.tally.endings[0])
        return self._response(self._status)

    def chunks(self, delta: Delta) -> list[Json]:
        self.tally.add(delta)
        if not self._num_events:
            for name in ("created", "in_progress"):
                self._emit(f"response.{name}", response=self._response("in_progress"))
        self._grow(delta.spans, delta.ending)
        events, self._events = self._events, []
        return events

    def last(self) -> Json:
        return self._event(f"response.{self._status}", response=self._response(self._status))

    async def settled(self, final: Json) -> Json:
        """The response, or its last event, which says whether it was stored."""
        response = final.get("response", final)
        assert isinstance(response, dict)
        if self.wanted.store:
            stored = StoredResponse(response, [*self.messages, *messages_of(items_of(self._output))])
            response["store"] = await self.keep(self._id, stored)
        return final

    def failure(self, error: Json) -> Json:
        """The event of an error in mid-stream: the fields of OpenAI's event, and `error`, at which its package raises."""
        detail = error["error"]
        assert isinstance(detail, dict)
        return self._event("error", **{name: detail[name] for name in ("code", "message", "param")}, error=detail)

    @property
    def _id(self) -> str:
        return self.id_prefix + self.request.request_id

    @property
    def _status(self) -> str:
        """At the end."""
        return "incomplete" if self.tally.endings[0].reason in INCOMPLETE else "completed"

    def _grow(self, spans: Sequence[Span], ending: Ending | None) -> None:
        """Append the spans to the output. One by one if log-probabilities are told: each stands beside the text of its token, however many
        tokens arrive together."""
        for piece in [[span] for span in spans] if self.logprobs else [spans]:
            self._append(piece, ended=False)
        if ending is not None:
            self._append([], ended=True)
            if not self._output:
                self._open("message", role="assistant", content=[])
            if self._growing == "message" and self._held_logprobs:  # the token that ends it has no text
                self._append_text("message", "")
            self._close(self._status)

    def _append(self, spans: Sequence[Span], *, ended: bool) -> None:
        reasoning, parts = self._parts(0, spans, ended=ended)
        if self.logprobs:
            self._held_logprobs += token_logprobs(spans, self.names)
        if reasoning:
            self._append_text("reasoning", reasoning)
        for part in parts:
            if isinstance(part, str):
                self._append_text("message", part)
                continue
            self._taken_logprobs()  # those of calls are not told
            if part.name:
                self._open("function_call", call_id=call_id(), name=part.name, arguments="")
            else:
                self._text.append(part.arguments)
                self._emit_of_item("response.function_call_arguments.delta", delta=part.arguments)

    def _taken_logprobs(self) -> list[Fragment]:
        """Those held, without those of thoughts, which are the first tokens. How many these are is known when the answer begins."""
        taken = self._held_logprobs[max(0, self.num_reasoning_tokens - self._num_taken) :]
        self._num_taken += len(self._held_logprobs)
        self._held_logprobs = []
        return taken

    def _append_text(self, kind: Literal["message", "reasoning"], text: str) -> None:
        if self._growing != kind:
            own: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            self._open(kind, **own, content=[])
        self._text.append(text)
        logprobs = self._taken_logprobs() if kind == "message" else []
        self._text_logprobs += logprobs
        self._emit_of_text("delta", delta=text, logprobs=logprobs)

    def _open(self, kind: Kind, **fields: object) -> None:
        """Complete the growing item, if there is one, and begin a new one."""
        self._close("completed")
        self._growing, self._text, self._text_logprobs = kind, [], []
        item_id = f"{ID_PREFIXES[kind]}_{self.request.request_id}_{len(self._output)}"
        self._output.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])
        if kind != "function_call":
            self._emit_of_item("response.content_part.added", content_index=0, part=self._part())

    def _close(self, status: str) -> None:
        """Complete the growing item, if there is one."""
        if self._growing is None:
            return
        item, text = self._output[-1], "".join(self._text)
        if self._growing == "function_call":
            self._emit_of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
            done: Json = {"arguments": text}
        else:
            self._emit_of_text("done", text=text, logprobs=self._text_logprobs)
            self._emit_of_item("response.content_part.done", content_index=0, part=self._part())
            done = {"content": [self._part()]}
        self._growing = None
        self._output[-1] = item | done | {"status": status}  # a new object: events have the old one
        self._emit("response.output_item.done", output_index=len(self._output) - 1, item=self._output[-1])

    def _part(self) -> Json:
        """The text of the growing item so far."""
        text = "".join(self._text)
        if self._growing == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._text_logprobs)}

    def _emit_of_text(self, name: str, *, logprobs: list[Fragment], **fields: object) -> None:
        """An event of the text of the growing item."""
        if self._growing == "reasoning":
            self._emit_of_item(f"response.reasoning_text.{name}", content_index=0, **fields)
        else:
            self._emit_of_item(f"response.output_text.{name}", content_index=0, logprobs=logprobs, **fields)

    def _emit_of_item(self, kind: str, **fields: object) -> None:
        """An event of the last item."""
        self._emit(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _emit(self, kind: str, **fields: object) -> None:
        self._events.append(self._event(kind, **fields))

    def _event(self, kind: str, **fields: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str) -> Json:
        """The response as it is now, with the usage if it has ended."""
        wanted, ended = self.wanted, status != "in_progress"
        choice, form = wanted.tool_choice, wanted.text.format
        details = {"reason": INCOMPLETE[self.tally.endings[0].reason]} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": wanted.instructions or None,
            "max_output_tokens": wanted.max_output_tokens,
            "metadata": wanted.metadata,
            "model": self.service.served_model,
            "output": list(self._output),
            "parallel_tool_calls": wanted.parallel_tool_calls,
            "previous_response_id": wanted.previous_response_id or None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": wanted.store,
            "temperature": self.request.sampling.temperature,
            "text": {"format": {"type": form.type, **form.model_dump(by_alias=True, exclude_defaults=True)}},
            "tool_choice": {"type": choice.type, "name": choice.name} if choice.name else choice.type,
            "tools": [tool.model_dump() for tool in wanted.tools],
            "top_logprobs": wanted.top_logprobs,
            "top_p": self.request.sampling.top_p,
            "truncation": "disabled",
            "usage": self._response_usage() if ended else None,
            "user": wanted.user or None,
            **(self._metrics() if ended else {}),
        }

    def _response_usage(self) -> Json:
        counts = self.tally.usage
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": counts.total_tokens,
        }
