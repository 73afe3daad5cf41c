"""Answers of /v1/responses: a chat's thoughts, text and calls as OpenAI's output items, whole and as events of a stream.

Both come from the same steps: an answer that is not streamed is the response in the last event of a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gateway.answers import ChatAnswer, Json, call_id, token_logprobs
from gateway.detokenizer import Span
from gateway.requests import Delta, Ending
from gateway.response_schemas import ResponseRequest, items_of, messages_of
from gateway.schemas import Message
from gateway.stored_responses import ID_PREFIX, StoredResponse
from rootward.core.requests import FinishReason

Kind: TypeAlias = Literal["message", "reasoning", "function_call"]

# Why an answer is incomplete. An abort is the operator's or the client's; OpenAI's server has no such reason.
INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORTED: "aborted"}


@dataclass(slots=True, kw_only=True)
class ResponseAnswer(ChatAnswer):
    """One answer in progress."""

    id_prefix = ID_PREFIX
    whole_object = chunk_object = "response"
    typed_events = True

    wanted: ResponseRequest
    messages: list[Message]  # of the conversation before it
    keep: Callable[[str, StoredResponse], Awaitable[bool]]  # under its id
    _output: list[Json] = field(default_factory=list)  # items; the last one may still grow
    _growing: Kind | None = None  # of the last item
    _text: list[str] = field(default_factory=list)  # of the growing item
    _logprobs_told: list[Json] = field(default_factory=list)  # of the growing item
    _new_logprobs: list[Json] = field(default_factory=list)  # of tokens whose text is held back
    _num_events: int = 0

    @property
    def resumable(self) -> bool:
        return False

    def whole(self, spans: Mapping[int, Sequence[Span]]) -> Json:
        self._grow(spans[0], self.tally.endings[0])
        return self._response(self._status)

    def chunks(self, delta: Delta) -> list[Json]:
        self.tally.add(delta)
        events: list[Json] = []
        if not self._num_events:
            for name in ("created", "in_progress"):
                events.append(self._event(f"response.{name}", response=self._response("in_progress")))
        return events + self._grow(delta.spans, delta.ending)

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

    def _grow(self, spans: Sequence[Span], ending: Ending | None) -> list[Json]:
        """Append the spans to the output; returns the events for them."""
        num_thoughts = self.num_reasoning_tokens
        reasoning, parts = self._parts(0, spans, ended=ending is not None)
        if self.logprobs:
            answer = spans[self.num_reasoning_tokens - num_thoughts :]
            self._new_logprobs += token_logprobs(answer, self.names)
        events = self._say("reasoning", reasoning)
        for part in parts:
            if isinstance(part, str):
                events += self._say("message", part)
            elif part.name:
                events += [*self._close("completed"), *self._open_call(part.name)]
            else:
                self._text.append(part.arguments)
                events.append(self._item_event("response.function_call_arguments.delta", delta=part.arguments))
        if ending is None:
            return events
        if not self._output:
            events += self._open("message")
        return events + self._close(self._status)

    def _say(self, kind: Kind, text: str) -> list[Json]:
        if not text:
            return []
        events = [] if self._growing == kind else [*self._close("completed"), *self._open(kind)]
        self._text.append(text)
        logprobs: list[Json] = []
        if kind == "message":
            logprobs, self._new_logprobs = self._new_logprobs, []
            self._logprobs_told += logprobs
        return [*events, self._part_event("delta", delta=text, logprobs=logprobs)]

    def _open(self, kind: Kind) -> list[Json]:
        """Begin a new item."""
        self._growing, self._text, self._logprobs_told = kind, [], []
        if kind == "reasoning":
            item: Json = {"id": self._item_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
        else:
            item = {"id": self._item_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        added = self._add(item | {"content": []})
        return [added, self._item_event("response.content_part.added", content_index=0, part=self._part())]

    def _open_call(self, name: str) -> list[Json]:
        self._growing, self._text = "function_call", []
        item: Json = {"id": self._item_id("fc"), "type": "function_call", "status": "in_progress"}
        return [self._add(item | {"call_id": call_id(), "name": name, "arguments": ""})]

    def _close(self, status: str) -> list[Json]:
        """Complete the growing item, if there is one."""
        if self._growing is None:
            return []
        if self._growing == "function_call":
            arguments, item = "".join(self._text), self._output[-1]
            events = [self._item_event("response.function_call_arguments.done", name=item["name"], arguments=arguments)]
            self._output[-1] = item | {"arguments": arguments, "status": status}
        else:
            part = self._part()
            events = [
                self._part_event("done", text=part["text"], logprobs=self._logprobs_told),
                self._item_event("response.content_part.done", content_index=0, part=part),
            ]
            self._output[-1] = self._output[-1] | {"status": status, "content": [part]}
        self._growing = None
        last = len(self._output) - 1
        return [*events, self._event("response.output_item.done", output_index=last, item=self._output[last])]

    def _item_id(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}_{self.request.request_id}_{len(self._output)}"

    def _part(self) -> Json:
        """The text of the growing item so far."""
        text = "".join(self._text)
        if self._growing == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs_told)}

    def _add(self, item: Json) -> Json:
        self._output.append(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _part_event(self, name: str, *, logprobs: list[Json], **fields: object) -> Json:
        """An event of the text of the growing item."""
        if self._growing == "reasoning":
            return self._item_event(f"response.reasoning_text.{name}", content_index=0, **fields)
        return self._item_event(f"response.output_text.{name}", content_index=0, logprobs=logprobs, **fields)

    def _item_event(self, kind: str, **fields: object) -> Json:
        """An event of the last item."""
        last = len(self._output) - 1
        return self._event(kind, item_id=self._output[last]["id"], output_index=last, **fields)

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
            "temperature": wanted.temperature,
            "text": {"format": {"type": form.type, **form.model_dump(by_alias=True, exclude_defaults=True)}},
            "tool_choice": {"type": choice.type, "name": choice.name} if choice.name else choice.type,
            "tools": [tool.model_dump() for tool in wanted.tools],
            "top_logprobs": wanted.top_logprobs,
            "top_p": wanted.top_p,
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
