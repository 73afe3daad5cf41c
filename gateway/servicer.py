"""The public gRPC API: the services rootward.v1.Inference and rootward.v1.Control, and the conversion of their messages."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

from google.protobuf.message import Message
from pydantic_core import PydanticCustomError

import rootward
from gateway.auth import ends_requests_of, rpc_headers, tenant
from gateway.choices import Tally, coalesced, concurrent_deltas, outputs, tokenised
from gateway.detokenizer import Span, text_of
from gateway.http_guard import check_structure
from gateway.models import Models
from gateway.planning import check_length, check_name, refusing
from gateway.requests import Chat, Delta, Ending, GenerateRequest, Resume, speculation_of
from gateway.router import Upstream
from gateway.schemas import MAX_MESSAGES, spellable
from gateway.service import SLOW_CLIENT_S, GatewayService
from rootward.client.codec import LOAD, ROUND, TIMING, USAGE
from rootward.core.requests import Speculation
from rootward.errors import DeadlineExceeded, InvalidRequest, UnsupportedParameter
from rootward.v1 import control_pb2, control_pb2_grpc, generate_pb2, generate_pb2_grpc
from rootward.wire.columns import pack_u32
from rootward.wire.public_codec import REASONS, processors_from_pb, structure_from_pb
from rootward.wire.server import SMALL_BYTES, RpcServer
from rootward.wire.status import Context, errors_as_status
from rootward.wire.values_codec import MODEL, logprobs_to_pb, stats_to_pb

FEATURES = (
    "abort",
    "chat_template",
    "choices",
    "coupled",
    "logprobs",
    "penalties",
    "priority",
    "resume",
    "speculation_control",
    "stop_strings",
    "structured_output",
    "text_ends",
    "trees",
    "watch",
)


def register(models: Models, server: RpcServer, *, shutdown_timeout_s: float) -> None:
    """Offer both services on a server."""
    generate_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(models), server.grpc)
    control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(models, shutdown_timeout_s), server.grpc)
    server.services += ["rootward.v1.Inference", "rootward.v1.Control"]
    server.limits["/rootward.v1.Control/"] = SMALL_BYTES


class InferenceServicer(generate_pb2_grpc.InferenceServicer):
    """Generates. Cancelling a call cancels the generation."""

    def __init__(self, models: Models):
        self._models = models

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Context) -> generate_pb2.GenerateResponse:
        """The whole answer."""
        async with errors_as_status(context, request.request_id):
            with self._models.calls.counting():
                if request.response.trees:
                    fix = "is for GenerateStream; trees are sent as they are verified"
                    raise UnsupportedParameter("response.trees", True, fix)
                service = self._models.of(request.model)
                wanted = _request(service, request, context)
                requests, tally = await _outputs(service, wanted, context), Tally(wanted.n, holds_output=True)
            deltas = concurrent_deltas(service.generate, requests)
            spans: dict[int, list[Span]] = {}
            choices: dict[int, generate_pb2.Choice] = {}
            async with service.logprob_share(requests[0]) as tally.share, aclosing(deltas):
                async for delta in deltas:
                    tally.add(delta)
                    spans.setdefault(delta.index, []).extend(delta.spans)
                    if delta.ending is not None:
                        whole = replace(delta, offset=0, spans=tuple(spans.pop(delta.index)))
                        choices[delta.index] = await service.tokenizer_pool.answer(
                            _size(whole), choice_to_pb, whole, request.response
                        )
        return generate_pb2.GenerateResponse(
            request_id=delta.request_id,
            model=service.served_model,
            choices=[choice for _, choice in sorted(choices.items())],
            usage=USAGE.to_pb(tally.usage),
        )

    async def GenerateStream(  # type: ignore[override]  # writes to the context instead of yielding
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> None:
        """Deltas. They are written to the context, not yielded, so that a cancelled call closes the generation at once."""
        async with errors_as_status(context, request.request_id), _slow_clients_end(self._models):
            with self._models.calls.counting():
                service = self._models.of(request.model)
                wanted = _request(service, request, context)
                requests, tally = await _outputs(service, wanted, context), Tally(wanted.n)
            runs = coalesced(concurrent_deltas(service.generate, requests), request.response.stream_interval)
            async with service.logprob_share(requests[0]) as tally.share, aclosing(runs):
                async for delta in runs:
                    tally.add(delta)
                    chunk = await service.tokenizer_pool.answer(_size(delta), chunk_to_pb, delta, request.response)
                    if len(tally.endings) == wanted.n:
                        chunk.usage.CopyFrom(USAGE.to_pb(tally.usage))
                    await context.write(chunk)

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeResponse:
        async with _refusals_as_status(self._models, context):
            special = _optional(request, "add_special_tokens")
            service = self._models.of(request.model)
            kind = request.WhichOneof("prompt")
            if kind is None:
                raise InvalidRequest("prompt", "", "is missing; send text or chat")
            prompt = chat_from_pb(request.chat) if kind == "chat" else request.text
            ids = await service.tokenize(prompt, add_special_tokens=special, tenant=tenant(rpc_headers(context)))
            longest = service.model.max_positions
        return generate_pb2.TokenizeResponse(token_ids=ids, max_model_len=longest)

    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeResponse:
        async with _refusals_as_status(self._models, context):
            skip = _optional(request, "skip_special_tokens", True)
            text = await self._models.of(request.model).detokenize(
                request.token_ids, skip_special_tokens=skip, tenant=tenant(rpc_headers(context))
            )
        return generate_pb2.DetokenizeResponse(text=text)


async def _outputs(service: GatewayService, wanted: GenerateRequest, context: Context) -> list[GenerateRequest]:
    """One request for each choice. Sends the request id at once, as initial metadata."""
    requests = await tokenised(outputs(wanted), service.prompt_ids)
    check_name("request_id", requests[0].request_id)
    await context.send_initial_metadata((("x-request-id", requests[0].request_id),))
    return requests


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Information on the models and the load; abort, drain, watch."""

    def __init__(self, models: Models, shutdown_timeout_s: float):
        self._models, self._shutdown_timeout_s = models, shutdown_timeout_s

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: Context
    ) -> control_pb2.ServerInfo:
        """Answers also while no verifier is up; then without models."""
        first = next(iter(self._models))
        models = [_model(service) for service in self._models if service.upstreams.model]
        upstreams = [upstream for service in self._models for upstream in service.upstreams]
        drafters = {name for u in upstreams if u.ready and u.info for name in u.info.drafters}
        return control_pb2.ServerInfo(
            version=rootward.__version__,
            role="gateway",
            worker=first.worker,
            incarnation=first.incarnation,
            lossless=min((model.lossless for model in models), default=control_pb2.ServerInfo.DISTRIBUTION),
            models=models,
            verifiers=map(worker_to_pb, upstreams),
            drafters=[control_pb2.WorkerInfo(name=name, address=name, ready=True) for name in sorted(drafters)],
            features=FEATURES,
            uptime_s=first.uptime_s,
            clock_s=time.time(),
        )

    async def GetModelInfo(self, request: control_pb2.GetModelInfoRequest, context: Context) -> control_pb2.ModelInfo:
        async with _refusals_as_status(self._models, context):
            return _model(self._models.of(request.model))

    async def ListModels(
        self, request: control_pb2.ListModelsRequest, context: Context
    ) -> control_pb2.ListModelsResponse:
        async with _refusals_as_status(self._models, context):
            return control_pb2.ListModelsResponse(models=map(_model, self._models.listed()))

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: Context) -> control_pb2.LoadInfo:
        return LOAD.to_pb(self._models.load)

    async def WatchSession(
        self, request: control_pb2.WatchSessionRequest, context: Context
    ) -> AsyncIterator[control_pb2.SessionEvent]:
        """Events of a session until the caller leaves, of a request until it has ended."""
        async with _refusals_as_status(self._models, context):
            kind = request.WhichOneof("watched")
            if kind is None or not getattr(request, kind):
                raise InvalidRequest(kind or "session_id", "", "is missing; send session_id or request_id")
            check_name(kind, getattr(request, kind))
            events = self._models.watching.watch(**{kind: getattr(request, kind)})
            async with aclosing(events):
                await context.send_initial_metadata(())  # the watch has begun
                async for event in events:
                    yield event

    async def Abort(self, request: control_pb2.AbortRequest, context: Context) -> control_pb2.AbortResponse:
        aborted = self._models.abort(request.request_ids, tenant=ends_requests_of())
        return control_pb2.AbortResponse(aborted=aborted)

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.DrainResponse:
        """Start a drain; returns at once."""
        async with _refusals_as_status(self._models, context):
            if not 0 <= request.timeout_s < math.inf:
                raise InvalidRequest("timeout_s", request.timeout_s, "is no time to wait; send seconds of 0 or more")
            running = self._models.load.num_running
            self._models.start_draining(request.timeout_s or self._shutdown_timeout_s)
        return control_pb2.DrainResponse(num_running=running)


def _model(service: GatewayService) -> control_pb2.ModelInfo:
    message: control_pb2.ModelInfo = MODEL.to_pb(service.model)
    message.name = service.served_model
    return message


def worker_to_pb(upstream: Upstream) -> control_pb2.WorkerInfo:
    info = upstream.info
    return control_pb2.WorkerInfo(
        name=info.worker if info else "",
        address=upstream.name,
        model=info.model.name if info else "",
        ready=upstream.ready,
        draining=bool(info and info.draining),
    )


@asynccontextmanager
async def _refusals_as_status(models: Models, context: Context) -> AsyncIterator[None]:
    """Around the body of a handler that generates nothing."""
    async with errors_as_status(context):
        with models.calls.counting():
            yield


@asynccontextmanager
async def _slow_clients_end(models: Models) -> AsyncIterator[None]:
    """Bounds the time that a client which does not read keeps its generation waiting."""
    longest_s = max(service.settings.request_timeout_s for service in models)
    try:
        async with asyncio.timeout(longest_s + SLOW_CLIENT_S):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the client read too slowly", metadata={"phase": "send"}) from None


def _request(service: GatewayService, message: generate_pb2.GenerateRequest, context: Context) -> GenerateRequest:
    if (model := service.upstreams.model) is not None:  # before a long list of tokens becomes a tuple
        check_length("prompt", len(message.token_ids.ids), model)
        allowed = len(message.decoding.allowed_token_ids)
        if allowed > model.vocab_size:
            raise InvalidRequest("allowed_token_ids", allowed, f"ids are more than the {model.vocab_size} tokens")
    return request_from_pb(message, deadline_s=context.time_remaining(), metadata=rpc_headers(context))


def request_from_pb(
    message: generate_pb2.GenerateRequest, *, deadline_s: float | None = None, metadata: Mapping[str, str] | None = None
) -> GenerateRequest:
    """The request of a client. `metadata` is that of the call. InvalidRequest names the field that cannot be served."""
    headers = metadata or {}
    stopping, response = message.stopping, message.response
    with refusing():
        return GenerateRequest(
            prompt=_prompt(message),
            request_id=message.request_id or headers.get("x-request-id", ""),
            model=message.model,
            sampling=processors_from_pb(message.sampling, message.decoding),
            max_tokens=_optional(stopping, "max_tokens"),
            stop=tuple(stopping.stop),
            stop_token_ids=tuple(stopping.stop_token_ids),
            include_stop=stopping.include_stop_str_in_output,
            ignore_eos=stopping.ignore_eos,
            skip_special_tokens=_optional(response, "skip_special_tokens", True),
            seed=_optional(message.sampling, "seed"),
            speculation=_speculation(message.speculation),
            session_id=message.session_id or headers.get("x-session-id", ""),
            deadline_s=deadline_s,
            min_tokens=stopping.min_tokens,
            structure=structure_from_pb(message.decoding),
            bad_words=tuple(message.decoding.bad_words),
            logprobs=_optional(response, "logprobs"),
            n=_optional(message.sampling, "n", 1),
            priority=message.priority,
            tenant=tenant(headers),
            resume=_resume(message),
            prompt_logprobs=_optional(response, "prompt_logprobs"),
            prediction=message.speculation.prediction,
            traceparent=headers.get("traceparent", ""),
            cache_salt=uuid.uuid4().hex if message.cache.bypass_prefix_cache else message.cache.cache_salt,
            trees=response.trees,
        )


def chat_from_pb(message: generate_pb2.ChatPrompt) -> Chat:
    """The conversation of a client. InvalidRequest if it is empty."""
    if not message.messages:
        raise InvalidRequest("chat.messages", 0, "messages are not enough; send at least one")
    if len(message.messages) > MAX_MESSAGES:  # before each of them is converted
        raise InvalidRequest("chat.messages", len(message.messages), f"messages are more than {MAX_MESSAGES}")
    check_structure(message.template_kwargs_json.encode(), field="chat.template_kwargs_json")
    try:
        template_kwargs = json.loads(message.template_kwargs_json or "{}")
    except (ValueError, RecursionError):
        template_kwargs = None
    given = message.template_kwargs_json[:32]
    if not isinstance(template_kwargs, dict):
        raise InvalidRequest("chat.template_kwargs_json", given, "is no JSON object")
    try:
        spellable(template_kwargs)
    except PydanticCustomError as error:
        raise InvalidRequest("chat.template_kwargs_json", given, error.message()) from None
    return Chat(
        tuple(
            {"role": one.role, "content": one.content, **({"name": one.name} if one.name else {})}
            for one in message.messages
        ),
        _optional(message, "add_generation_prompt", True),
        message.continue_final_message,
        template_kwargs,
    )


def finish_to_pb(ending: Ending, *, detail: bool) -> generate_pb2.Finish:
    """The finish message. `detail` adds the histogram of accepted lengths."""
    stats = ending.stats if detail else replace(ending.stats, acceptance_histogram=())
    finish = generate_pb2.Finish(
        reason=REASONS[ending.reason],
        speculation=stats_to_pb(stats),
        timing=TIMING.to_pb(ending.timing),
        warnings=ending.warnings,
    )
    for field in ("eos_token_id", "stop_token_id", "stop_string"):
        if (value := getattr(ending, field)) is not None:
            setattr(finish, field, value)
    return finish


def _size(delta: Delta) -> int:
    """Characters whose tokenisation takes about as long as it takes to write this output with its log-probabilities."""
    size = len(delta.spans)
    if delta.spans and (first := delta.spans[0].logprob) is not None:
        size *= 1 + len(first.top)
    if delta.offset == 0 and delta.prompt_logprobs:
        size += len(delta.prompt_logprobs) * (1 + len(delta.prompt_logprobs[0].top))
    return size


def choice_to_pb(delta: Delta, response: generate_pb2.ResponseOptions) -> generate_pb2.Choice:
    """A whole output with the fields that the client asks for."""
    choice = generate_pb2.Choice(index=delta.index)
    _set_output(choice, delta, response)
    return choice


def chunk_to_pb(delta: Delta, response: generate_pb2.ResponseOptions) -> generate_pb2.GenerateChunk:
    """A delta with the fields that the client asks for."""
    chunk = generate_pb2.GenerateChunk(request_id=delta.request_id, index=delta.index, offset=delta.offset)
    _set_output(chunk, delta, response)
    if response.speculation_detail:
        chunk.text_ends = pack_u32(list(accumulate(len(s.text) for s in delta.spans)), "text_ends")
    chunk.rounds.extend(map(ROUND.to_pb, delta.rounds))
    return chunk


def _set_output(
    message: generate_pb2.GenerateChunk | generate_pb2.Choice, delta: Delta, response: generate_pb2.ResponseOptions
) -> None:
    """Text, ids and log-probabilities, if the client asks for them, and the finish of a last delta."""
    if _optional(response, "text", True):
        message.text = text_of(delta.spans)
    if _optional(response, "token_ids", True):
        message.token_ids = pack_u32([s.token for s in delta.spans], "token_ids")
        message.accepted = bytes(s.accepted for s in delta.spans)
    if response.HasField("logprobs") and delta.spans:
        message.logprobs.CopyFrom(logprobs_to_pb([s.logprob for s in delta.spans if s.logprob is not None]))
    if delta.offset == 0 and delta.prompt_logprobs:
        message.prompt_logprobs.CopyFrom(logprobs_to_pb(delta.prompt_logprobs))
    if delta.ending is not None:
        message.finish.CopyFrom(finish_to_pb(delta.ending, detail=response.speculation_detail))


def _prompt(message: generate_pb2.GenerateRequest) -> str | tuple[int, ...] | Chat:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "chat":
        return chat_from_pb(message.chat)
    if kind == "token_ids" and message.token_ids.ids:
        return tuple(message.token_ids.ids)
    raise InvalidRequest("prompt", "", "is missing or empty; send text, token_ids or chat")


def _resume(message: generate_pb2.GenerateRequest) -> Resume | None:
    received = tuple(message.resume_tokens.ids)
    offset = _optional(message, "resume_offset", len(received) or None)
    return None if offset is None else Resume(offset, received)


def _speculation(message: generate_pb2.Speculation) -> Speculation:
    mode = _enum_name(generate_pb2.Speculation.Mode, "speculation.mode", message.mode)
    verification = _enum_name(generate_pb2.Speculation.Verification, "speculation.verification", message.verification)
    return speculation_of(
        mode or "auto",
        verification,
        message.draft_strategy or None,
        num_draft_tokens=_optional(message, "num_draft_tokens"),
        max_depth=_optional(message, "max_depth"),
        topk=_optional(message, "topk"),
        drafter=message.drafter,
    )


def _optional(message: Message, field: str, default: Any = None) -> Any:
    """The value of an optional field, `default` if the message has none."""
    return getattr(message, field) if message.HasField(field) else default


def _enum_name(kind: Any, field: str, number: int) -> str:
    """The name in lower case, "" for the unspecified 0. InvalidRequest for a number without a name."""
    names = {value: "" if value == 0 else name.lower() for name, value in kind.items()}
    if number not in names:
        raise InvalidRequest(field, number, f"is unknown; use {', '.join(n.upper() for n in names.values() if n)}")
    return names[number]
