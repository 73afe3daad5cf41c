"""The HTTP API: its routes and the page at `/`. FastAPI writes `/openapi.json`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import rootward
from gateway import answer_schemas, response_schemas, schemas
from gateway.answers import ChatAnswer, CompletionAnswer
from gateway.auth import tenant
from gateway.http_errors import error_response, invalid_body, json_response, not_served, request_id_of
from gateway.models import Models
from gateway.planning import check_name
from gateway.requests import GenerateRequest
from gateway.response_answers import ResponseAnswer
from gateway.stored_responses import ResponseStore
from gateway.streaming import GenerationResponse
from gateway.tools import MARKS, CallFormat, Tools, call_format_of
from rootward.errors import InvalidRequest, NotFound, ServiceError, UnsupportedParameter

PAGE = Path(__file__).parent / "page"
GET_OR_HEAD = ["GET", "HEAD"]  # methods of routes that uptime monitors ask
PAGE_HEADERS = {  # no sources but this server, no inline scripts
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
REFUSAL: dict[int | str, dict[str, Any]] = {
    "default": {"model": answer_schemas.Error, "description": "A refusal or a failure."}
}
# The events of a stream: Completion or ChatChunk and then [DONE], or ResponseEvent.
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


def build_app(
    models: Models,
    *,
    stored: ResponseStore | None = None,
    reasoning_content: bool = False,
    call_formats: Mapping[str, CallFormat] | None = None,
) -> FastAPI:
    """The ASGI application of a gateway.

    stored: answers of /v1/responses (default: in memory). reasoning_content: chats have thoughts in tags as a field of their own.
    call_formats: formats of tool calls by the served names of models (default: those of their chat templates).
    """
    call_formats, responses, created = call_formats or {}, stored or ResponseStore(), int(time.time())
    app = FastAPI(
        title="Rootward",
        version=rootward.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # behind a proxy that ends TLS, to an address without it: clients would send the prompt in clear
        responses=REFUSAL,
        strict_content_type=False,  # `http_guard` checks it
        # Spans are those of `rootward.tracing`, which have no contents of requests and honour the sampling share.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
    for kind in (HTTPException, RequestValidationError, ServiceError, Exception):
        app.add_exception_handler(kind, partial(_refused, models))

    def requested(request: Request, body: schemas.GenerationBody) -> GenerateRequest:
        """The request to the service, under the client's id or a new one."""
        headers = {**request.headers, "x-request-id": request_id_of(request.headers)}
        wanted = body.request(headers, models.of(body.model).http_sampling)
        check_name("request_id", wanted.request_id)
        return wanted

    def chat(request: Request, body: schemas.ChatRequest, kind: Callable[..., ChatAnswer]) -> Response:
        service = models.of(body.model)
        known = call_format_of(service.tokenizer)
        form = body.call_format(known if known is Tools.NONE else call_formats.get(service.served_model, known))
        thoughts = reasoning_content and body.output_form is None
        if "last-event-id" in request.headers and (form is not None or thoughts or kind is not ChatAnswer):
            fix = "is of no stream that can be resumed: those of plain text can; send the request again"
            raise InvalidRequest("last-event-id", request.headers["last-event-id"][:16], fix)
        structure = body.structure(form, marks=list(filter(service.tokenizer.is_token, MARKS)))
        if form is CallFormat.MISTRAL:  # calls begin with a special token
            body = body.model_copy(update={"skip_special_tokens": False})
        wanted = replace(requested(request, body), structure=structure)
        answer = kind(service=service, body=body, request=wanted, call_format=form, reasoning=thoughts)
        return GenerationResponse(answer, models.calls)

    @app.post("/v1/completions", responses=_answers(answer_schemas.Completion, EVENTS))
    async def completions(request: Request, body: schemas.CompletionRequest) -> Response:
        """Continues prompts."""
        wanted = requested(request, body)
        answer = CompletionAnswer(service=models.of(body.model), body=body, request=wanted)
        return GenerationResponse(answer, models.calls)

    @app.post("/v1/chat/completions", responses=_answers(answer_schemas.ChatCompletion, EVENTS))
    async def chat_completions(request: Request, body: schemas.ChatRequest) -> Response:
        """Answers a conversation, with tools where the model has them."""
        return chat(request, body, ChatAnswer)

    @app.post("/v1/responses", responses=_answers(answer_schemas.Response, EVENTS))
    async def create_response(request: Request, body: response_schemas.ResponseRequest) -> Response:
        """Answers a conversation in items, and stores the answer if `store`."""
        owner, before = tenant(request.headers), []
        if body.previous_response_id:
            before = (await responses.find(owner, body.previous_response_id)).messages
        messages = [*before, *body.messages]
        answer = partial(ResponseAnswer, wanted=body, messages=messages, keep=partial(responses.keep, owner))
        return chat(request, body.chat(messages), answer)

    @app.get("/v1/responses/{response_id}", responses=_answers(answer_schemas.Response))
    async def response(request: Request, response_id: str) -> Response:
        """A stored answer."""
        for name, value in request.query_params.items():
            raise UnsupportedParameter(name, value[:32], "is not supported by this server; leave it out")
        found = await responses.find(tenant(request.headers), response_id)
        return json_response(found.answer)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> answer_schemas.DeletedResponse:
        """Deletes a stored answer."""
        await responses.delete(tenant(request.headers), response_id)
        return answer_schemas.DeletedResponse(id=response_id)

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)  # otherwise the path of a model without a name
    async def list_models() -> answer_schemas.ModelList:
        """The models served."""
        cards = [answer_schemas.ModelCard.of(s.served_model, s.model, created) for s in models.listed()]
        return answer_schemas.ModelList(data=cards)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> answer_schemas.ModelCard:
        """One model."""
        service = models.of(name)
        return answer_schemas.ModelCard.of(service.served_model, service.model, created)

    @app.post("/tokenize", responses=_answers(answer_schemas.Tokens))
    async def tokenize(request: Request, body: schemas.TokenizeRequest) -> Response:
        """Token ids of a prompt or of messages; the texts of the tokens if `return_token_strs`."""
        service = models.of(body.model)
        ids = await service.tokenize(
            body.text_or_chat, add_special_tokens=body.add_special_tokens, tenant=tenant(request.headers)
        )
        texts = await service.token_texts(ids) if body.return_token_strs else None
        length = service.model.max_positions
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": length, "token_strs": texts})

    @app.post("/detokenize", responses=_answers(answer_schemas.Text))
    async def detokenize(request: Request, body: schemas.DetokenizeRequest) -> Response:
        """The text of token ids."""
        text = await models.of(body.model).detokenize(
            body.tokens, skip_special_tokens=body.skip_special_tokens, tenant=tenant(request.headers)
        )
        return json_response({"prompt": text})

    @app.api_route("/health/live", methods=GET_OR_HEAD, include_in_schema=False)
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.api_route("/health", methods=GET_OR_HEAD, include_in_schema=False)
    @app.api_route("/health/ready", methods=GET_OR_HEAD, include_in_schema=False)
    async def ready() -> Response:
        """503 when no verifier is ready or the gateway is draining. A missing drafter does not count."""
        status = (200, "ready") if models.ready else (503, "not ready")
        return json_response({"status": status[1]}, status=status[0])

    @app.get("/load")
    async def load() -> answer_schemas.Load:
        """How busy the gateway is. `server_load` is vLLM's name of the requests in it."""
        load = models.load
        return answer_schemas.Load(
            server_load=load.num_running + load.num_waiting,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            max_num_seqs=load.max_sessions,
            draining=load.draining,
        )

    @app.get("/version")
    async def version() -> answer_schemas.Version:
        """Of the gateway."""
        return answer_schemas.Version(version=rootward.__version__)

    @app.get("/tokenizer_info", include_in_schema=False)
    async def tokenizer_info(model: str = "") -> Response:
        """vLLM's: special tokens and template, for clients that tokenise over /tokenize (lm-eval does)."""
        return json_response(models.of(model).tokenizer.special_texts)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(models.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.api_route("/", methods=GET_OR_HEAD, include_in_schema=False)
    async def page() -> Response:
        """Type a prompt, watch the trees: static files that ask the API for everything else."""
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", _PageFiles(directory=PAGE))
    return app


class _PageFiles(StaticFiles):
    """StaticFiles with our headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def _answers(model: type[answer_schemas.Object], more: dict[str, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    """The answer of a route, for the description, since routes return plain dicts."""
    return {200: {"model": model, "content": more or {}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the events of streams."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = made["components"]["schemas"]
        for event in (answer_schemas.ChatChunk, answer_schemas.ResponseEvent):
            schema = event.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
            components |= {**schema.pop("$defs", {}), event.__name__: schema}
        app.openapi_schema = made
    return app.openapi_schema


async def _refused(models: Models, request: Request, error: Exception) -> Response:
    """Every error in OpenAI's form, with the request's id. Those of a generation are in its own answer."""
    try:
        headers = {"x-request-id": request_id_of(request.headers)}
    except InvalidRequest as bad_id:
        models.calls.refused(bad_id)
        return error_response(bad_id)
    path: str | None = request.url.path
    if isinstance(error, RequestValidationError):
        error, path = invalid_body(error.errors()), None
    elif isinstance(error, HTTPException):
        if error.status_code == 400:  # FastAPI's error for a body that json does not parse
            fix = "bytes are no JSON, or nested too deeply; send a JSON object"
            error = InvalidRequest("body", request.headers.get("content-length"), fix)
        else:
            models.calls.refused(NotFound("of a path or a method"))
            refusal = not_served(error, method=request.method, path=request.url.path)
            return json_response(refusal.body, status=refusal.status, headers=headers | refusal.headers)
    models.calls.refused(error)
    return error_response(error, headers, path=path)
