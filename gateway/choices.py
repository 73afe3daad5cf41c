"""The outputs of one request: n independent choices of each of its prompts, generated concurrently and read as one stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from gateway.admission import LogprobShare
from gateway.planning import MAX_ID_CHARACTERS, MAX_PROMPT_LOGPROBS
from gateway.requests import Delta, Ending, GenerateRequest
from rootward.client.types import Usage
from rootward.core.requests import TokenLogprob
from rootward.errors import InvalidRequest, UnsupportedParameter

MAX_OUTPUTS = 128  # prompts x choices of one request
OUTPUT_SEPARATOR = "#"  # between the id of a request and the index of an output (none for output 0)

Generate = Callable[[GenerateRequest], AsyncGenerator[Delta, None]]
PromptIds = Callable[[GenerateRequest], Awaitable[tuple[int, ...]]]


def outputs(request: GenerateRequest, prompts: Sequence[str | tuple[int, ...]] = ()) -> list[GenerateRequest]:
    """One request per output, ordered by prompt, then by choice. prompts: empty for the prompt of the request.

    Random numbers of choice i depend on (seed, i), so the first choices do not depend on n.
    """
    given = prompts or (request.prompt,)
    if not 1 <= request.n <= MAX_OUTPUTS:
        raise InvalidRequest("n", request.n, f"is outside [1, {MAX_OUTPUTS}]")
    if len(given) * request.n > MAX_OUTPUTS:
        raise InvalidRequest("prompt", len(given), f"prompts with {request.n} choices each are more than {MAX_OUTPUTS}")
    if request.resume is not None and len(given) * request.n > 1:
        fix = "outputs of one request are not resumed; send a new one"
        raise UnsupportedParameter("resume_offset", len(given) * request.n, fix)
    name = request.request_id or uuid.uuid4().hex
    last = f"{OUTPUT_SEPARATOR}{len(given) * request.n - 1}"
    if len(given) * request.n > 1 and len(name) + len(last) > MAX_ID_CHARACTERS:
        fix = f"with {last} behind it, the name of its last output, is longer than {MAX_ID_CHARACTERS} characters"
        raise InvalidRequest("request_id", f"{name[:16]}…", fix)
    ids = [f"{name}{OUTPUT_SEPARATOR}{index}" if index else name for index in range(len(given) * request.n)]
    return [
        replace(
            request,
            prompt=given[i // request.n],
            num_prompts=len(given),
            request_id=own,
            choice=i % request.n,
            index=i,
        )
        for i, own in enumerate(ids)
    ]


async def tokenised(requests: list[GenerateRequest], prompt_ids: PromptIds) -> list[GenerateRequest]:
    """The outputs of one request; several have the token ids of their prompts. Each prompt is tokenised once, and one after another: the
    tokenizer has fewer places than a request may have prompts."""
    num_choices = requests[0].n
    if len(requests) == 1:
        return requests
    ids = [await prompt_ids(request) for request in requests[::num_choices]]
    return [replace(request, prompt_ids=ids[request.index // num_choices]) for request in requests]


def is_output_of(request_id: str, wanted: Sequence[str]) -> bool:
    """Whether `request_id` is one of the wanted requests or an output of one."""
    return request_id in wanted or request_id.partition(OUTPUT_SEPARATOR)[0] in wanted


async def concurrent_deltas(generate: Generate, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Delta, None]:
    """Deltas of all outputs in order of arrival, each with its index and the client's request id, until the last output has ended.

    Closing the generator, or an error of one output, cancels all outputs.
    """
    if len(requests) == 1:  # the usual case
        async with aclosing(generate(requests[0])) as only:
            async for delta in only:
                yield delta
        return
    name = requests[0].request_id
    # Bounded, so that a slow reader throttles all outputs.
    arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue(len(requests))

    async def run(request: GenerateRequest) -> None:
        try:
            async with aclosing(generate(request)) as deltas:
                async for delta in deltas:
                    await arrived.put(replace(delta, index=request.index, request_id=name))
        except Exception as error:
            await arrived.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for request in requests:
            tasks.append(asyncio.create_task(run(request)))
            # Others run in between: with a long prompt the beginning of each takes tens of milliseconds.
            await asyncio.sleep(0)
        num_left = len(tasks)
        while num_left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_left -= item.ending is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Tally:
    """Totals over the deltas received so far, by output. A prompt counts once, not once per choice.

    share: is told of the log-probabilities that the answer holds; holds_output: those of the output are among them, since the answer is
    sent at its end."""

    num_choices: int = 1
    share: LogprobShare | None = None
    holds_output: bool = False
    endings: dict[int, Ending] = field(default_factory=dict)
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    _ends: dict[int, int] = field(default_factory=dict)  # number of output tokens so far, by output
    _num_prompt_logprobs: int = 0

    def add(self, delta: Delta) -> None:
        """InvalidRequest for more log-probabilities of prompts than an answer may have: one that has them all would end the gateway."""
        if delta.prompt_logprobs and not self.prompt_logprobs.get(delta.index):
            self._num_prompt_logprobs += len(delta.prompt_logprobs) * (1 + len(delta.prompt_logprobs[0].top))
            if self._num_prompt_logprobs > MAX_PROMPT_LOGPROBS:
                fix = f"of all prompts are more than {MAX_PROMPT_LOGPROBS}; ask for fewer per token, or send fewer prompts at once"
                raise InvalidRequest("prompt_logprobs", self._num_prompt_logprobs, fix)
            self._hold(delta.prompt_logprobs)
        if self.holds_output:
            self._hold([span.logprob for span in delta.spans if span.logprob is not None])
        self._ends[delta.index] = delta.offset + len(delta.spans)
        self.prompts[delta.index] = delta.prompt
        self.prompt_logprobs[delta.index] = delta.prompt_logprobs
        if delta.ending is not None:
            self.endings[delta.index] = delta.ending

    def completed(self) -> None:
        """All outputs have ended: the answer is written now, and not ended to make room for others."""
        if self.share is not None:
            self.share.growing = False

    def _hold(self, logprobs: Sequence[TokenLogprob]) -> None:
        if self.share is not None and logprobs:
            self.share.add(len(logprobs) * (1 + len(logprobs[0].top)))

    @property
    def usage(self) -> Usage:
        first = {i // self.num_choices: i for i in sorted(self.prompts, reverse=True)}.values()
        cached = sum(self.endings[i].usage.cached_tokens for i in first if i in self.endings)
        num_prompt, num_output = sum(len(self.prompts[i]) for i in first), sum(self._ends.values())
        return Usage(num_prompt, num_output, cached, self._sum("accepted"), self._sum("rejected"))

    def _sum(self, which: str) -> int | None:
        """Predicted tokens of all outputs; None without predictions."""
        counts = [getattr(ending.usage, f"{which}_prediction_tokens") for ending in self.endings.values()]
        return sum(counts) if counts and None not in counts else None

    @property
    def only(self) -> Ending | None:
        """The ending of a single output; None for several."""
        return self.endings[0] if len(self.endings) == 1 else None


async def coalesced(deltas: AsyncGenerator[Delta, None], interval: int) -> AsyncGenerator[Delta, None]:
    """Deltas merged until each has at least `interval` tokens; the last one of an output may have fewer."""
    held: dict[int, Delta] = {}
    async with aclosing(deltas):
        async for delta in deltas:
            if (before := held.pop(delta.index, None)) is not None:
                spans, rounds = before.spans + delta.spans, before.rounds + delta.rounds
                delta = replace(delta, offset=before.offset, text_offset=before.text_offset, spans=spans, rounds=rounds)
            if len(delta.spans) < interval and delta.ending is None:
                held[delta.index] = delta
                continue
            yield delta
