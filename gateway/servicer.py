"""The public gRPC face: rootward.v1.Inference and rootward.v1.Control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

import rootward
from gateway.access import ends_requests_of
from gateway.choices import Tally, in_runs, outputs, side_by_side, tokenised
from gateway.planning import check_model, check_name
from gateway.requests import Chat, Delta, GenerateRequest
from gateway.service import GatewayService
from gateway.servicer_codec import chat_from_pb, choice_to_pb, chunk_to_pb, request_from_pb, usage_to_pb
from gateway.servicer_watching import event_to_pb, verifier_load_to_pb
from gateway.stops import Span
from rootward.errors import DeadlineExceeded, InvalidRequest
from rootward.ports import ModelInfo
from rootward.v1 import control_pb2, control_pb2_grpc, generate_pb2, generate_pb2_grpc
from rootward.wire.codec import to_pb
from rootward.wire.server import RpcServer
from rootward.wire.status import errors_as_status

SLOW_CLIENT_S = 5.0  # beyond the longest request, for a client to read what it was sent
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
    "watch",
)


def register(service: GatewayService, server: RpcServer, *, shutdown_timeout_s: float) -> None:
    """Offer both services on a server."""
    generate_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(service), server.grpc)
    control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(service, shutdown_timeout_s), server.grpc)
    server.services += ["rootward.v1.Inference", "rootward.v1.Control"]


class InferenceServicer(generate_pb2_grpc.InferenceServicer):
    """Generates. Cancelling a call cancels the generation."""

    def __init__(self, service: GatewayService):
        self._service = service

    async def Generate(
        self,
        request: generate_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse],
    ) -> generate_pb2.GenerateResponse:
        """The whole answer."""
        spans: dict[int, list[Span]] = {}
        async with errors_as_status(context, request.request_id):
            wanted = _request(request, context)
            deltas, tally = await self._deltas(wanted, context), Tally(wanted.n)
            async with aclosing(deltas):
                async for delta in deltas:
                    spans.setdefault(delta.index, []).extend(delta.spans)
                    tally.add(delta)
        endings = sorted(tally.endings.items())
        return generate_pb2.GenerateResponse(
            request_id=delta.request_id,
            model=self._service.served_model,
            choices=[
                choice_to_pb(i, spans[i], ending, request.response, tally.prompt_logprobs[i]) for i, ending in endings
            ],
            usage=usage_to_pb(tally.usage),
        )

    async def GenerateStream(  # type: ignore[override]  # writes to the context instead of yielding
        self,
        request: generate_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateChunk],
    ) -> None:
        """Deltas. Written by hand, not yielded: so a cancelled call closes the generation at once."""
        async with errors_as_status(context, request.request_id), _slow_clients_end(self._service):
            wanted = _request(request, context)
            deltas, tally = await self._deltas(wanted, context), Tally(wanted.n)
            async with aclosing(in_runs(deltas, request.response.stream_interval)) as runs:
                async for delta in runs:
                    tally.add(delta)
                    chunk = chunk_to_pb(delta, request.response)
                    if len(tally.endings) == wanted.n:
                        chunk.usage.CopyFrom(usage_to_pb(tally.usage))
                    await context.write(chunk)

    async def _deltas(
        self, wanted: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Delta, None]:
        """All choices as one stream. The id goes out at once, with the initial metadata."""
        requests = await tokenised(outputs(wanted), wanted.n, self._service.prompt_ids)
        check_name("request_id", requests[0].request_id)
        await context.send_initial_metadata((("x-request-id", requests[0].request_id),))
        return side_by_side(self._service.generate, requests)

    async def Tokenize(
        self,
        request: generate_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[generate_pb2.TokenizeRequest, generate_pb2.TokenizeResponse],
    ) -> generate_pb2.TokenizeResponse:
        async with errors_as_status(context):
            special = request.add_special_tokens if request.HasField("add_special_tokens") else None
            ids = await self._service.tokenize(
                _tokenize_prompt(request), model=request.model, add_special_tokens=special
            )
            longest = self._service.model.max_positions
        return generate_pb2.TokenizeResponse(token_ids=ids, max_model_len=longest)

    async def Detokenize(
        self,
        request: generate_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[generate_pb2.DetokenizeRequest, generate_pb2.DetokenizeResponse],
    ) -> generate_pb2.DetokenizeResponse:
        async with errors_as_status(context):
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self._service.detokenize(request.token_ids, model=request.model, skip_special_tokens=skip)
        return generate_pb2.DetokenizeResponse(text=text)


class ControlServicer(control_pb2_grpc.ControlServicer):
    """What is served, how busy it is, how to stop it."""

    def __init__(self, service: GatewayService, shutdown_timeout_s: float):
        self._service = service
        self._shutdown_timeout_s = shutdown_timeout_s

    async def GetServerInfo(
        self,
        request: control_pb2.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[control_pb2.GetServerInfoRequest, control_pb2.ServerInfo],
    ) -> control_pb2.ServerInfo:
        """Answers also while no verifier is up; then without models."""
        service = self._service
        return control_pb2.ServerInfo(
            version=rootward.__version__,
            role="gateway",
            worker=service.worker,
            incarnation=service.incarnation,
            lossless=control_pb2.ServerInfo.DISTRIBUTION,
            models=[self._model()] if service.upstreams.model else [],
            verifiers=self._verifiers(),
            drafters=self._drafters(),
            features=FEATURES,
            uptime_s=service.uptime_s,
        )

    async def GetModelInfo(
        self,
        request: control_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[control_pb2.GetModelInfoRequest, control_pb2.ModelInfo],
    ) -> control_pb2.ModelInfo:
        async with errors_as_status(context):
            check_model(request.model, self._service.served_model)
            return self._model()

    async def ListModels(
        self,
        request: control_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[control_pb2.ListModelsRequest, control_pb2.ListModelsResponse],
    ) -> control_pb2.ListModelsResponse:
        async with errors_as_status(context):
            return control_pb2.ListModelsResponse(models=[self._model()])

    async def GetLoad(
        self,
        request: control_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[control_pb2.GetLoadRequest, control_pb2.LoadInfo],
    ) -> control_pb2.LoadInfo:
        admission, delivered = self._service.admission, self._service.metrics.delivered
        return control_pb2.LoadInfo(
            num_running=admission.num_running,
            num_waiting=admission.num_waiting,
            max_sessions=admission.max_num_seqs,
            draining=admission.draining,
            num_requests=delivered.num_requests,
            num_tokens=delivered.num_tokens,
            num_rounds=delivered.num_rounds,
            uptime_s=self._service.uptime_s,
            verifiers=[verifier_load_to_pb(u) for u in self._service.upstreams],
        )

    async def WatchSession(
        self,
        request: control_pb2.WatchSessionRequest,
        context: grpc.aio.ServicerContext[control_pb2.WatchSessionRequest, control_pb2.SessionEvent],
    ) -> AsyncIterator[control_pb2.SessionEvent]:
        """Until the request has ended, or the caller."""
        async with errors_as_status(context):
            kind = request.WhichOneof("watched")
            if kind is None or not getattr(request, kind):
                raise InvalidRequest(kind or "session_id", "", "is missing; send session_id or request_id")
            check_name(kind, getattr(request, kind))
            events = self._service.watching.watch(**{kind: getattr(request, kind)})
            async with aclosing(events):
                await context.send_initial_metadata(())  # the watch has begun
                async for event in events:
                    yield event_to_pb(event)

    async def Abort(
        self,
        request: control_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[control_pb2.AbortRequest, control_pb2.AbortResponse],
    ) -> control_pb2.AbortResponse:
        aborted = self._service.abort(request.request_ids, tenant=ends_requests_of())
        return control_pb2.AbortResponse(aborted=aborted)

    async def Drain(
        self,
        request: control_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[control_pb2.DrainRequest, control_pb2.DrainResponse],
    ) -> control_pb2.DrainResponse:
        """Returns at once; the drain goes on."""
        running = self._service.admission.num_running
        self._service.start_draining(request.timeout_s or self._shutdown_timeout_s)
        return control_pb2.DrainResponse(num_running=running)

    def _model(self) -> control_pb2.ModelInfo:
        model: ModelInfo = self._service.model
        message = to_pb(model)
        message.name = self._service.served_model
        return message

    def _verifiers(self) -> list[control_pb2.WorkerInfo]:
        return [
            control_pb2.WorkerInfo(
                name=u.info.worker if u.info else "",
                address=u.name,
                model=u.info.model.name if u.info else "",
                ready=u.ready,
                draining=bool(u.info and u.info.draining),
            )
            for u in self._service.upstreams
        ]

    def _drafters(self) -> list[control_pb2.WorkerInfo]:
        names = {name for u in self._service.upstreams if u.ready and u.info for name in u.info.drafters}
        return [control_pb2.WorkerInfo(name=name, address=name, ready=True) for name in sorted(names)]


@asynccontextmanager
async def _slow_clients_end(service: GatewayService) -> AsyncIterator[None]:
    """A client that does not read keeps its generation waiting, but not for ever."""
    try:
        async with asyncio.timeout(service.limits.request_timeout_s + SLOW_CLIENT_S):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the client read too slowly", metadata={"phase": "send"}) from None


def _request(message: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> GenerateRequest:  # type: ignore[type-arg]
    metadata = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
    return request_from_pb(message, deadline_s=context.time_remaining(), metadata=metadata)


def _tokenize_prompt(message: generate_pb2.TokenizeRequest) -> str | Chat:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "", "is missing; send text or chat")
    return chat_from_pb(message.chat) if kind == "chat" else message.text
