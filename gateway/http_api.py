"""The OpenAI-compatible HTTP face: its routes, and everything that is answered at once."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import rootward
from gateway.http_answers import model_card
from gateway.http_bodies import json_response, log_bug, read_body
from gateway.http_errors import http_error, simple_error
from gateway.http_fields import json_object
from gateway.http_generate import Generations
from gateway.http_logprobs import Names
from gateway.http_messages import conversation
from gateway.http_openapi import description
from gateway.http_page import page_routes
from gateway.http_requests import parse_chat, parse_completion
from gateway.http_shapes import ChatShape, TextShape
from gateway.http_values import boolean, one, string, token_ids
from gateway.planning import check_model
from gateway.requests import Chat
from gateway.service import GatewayService
from rootward.errors import ServiceError


def build_app(service: GatewayService) -> Starlette:
    """The ASGI application of a gateway."""
    api, names = HttpApi(service), Names(service.tokenizer)
    routes = [
        Route("/v1/completions", Generations(service, parse_completion, TextShape(), names), methods=["POST"]),
        Route("/v1/chat/completions", Generations(service, parse_chat, ChatShape(), names), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.ready),
        Route("/health/live", api.live),
        Route("/health/ready", api.ready),
        Route("/load", api.load),
        Route("/version", api.version),
        Route("/openapi.json", api.openapi),
        Route("/tokenizer_info", api.tokenizer_info),
        Route("/metrics", api.metrics),
        *page_routes(),
    ]
    return Starlette(
        routes=routes, exception_handlers={HTTPException: _no_such, ServiceError: _refused, Exception: _refused}
    )


class HttpApi:
    """Everything that is answered at once."""

    def __init__(self, service: GatewayService):
        self.service = service
        self._created = int(time.time())  # seconds since 1970

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self.service.served_model)
        return json_response(self._card())

    async def tokenize(self, request: Request) -> Response:
        """vLLM's: a prompt or messages in, token ids out; the texts of the tokens if `return_token_strs`."""
        body = json_object(await read_body(request))
        prompt: str | Chat
        if body.get("messages") is not None and body.get("prompt") is None:
            prompt = conversation(body)
        else:
            prompt = string("prompt", body.get("prompt"))
        ids = await self.service.tokenize(
            prompt,
            model=one(body, "model", string, ""),
            add_special_tokens=one(body, "add_special_tokens", boolean, None),
        )
        texts = one(body, "return_token_strs", boolean, False)
        return json_response(
            {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": self.service.model.max_positions,
                "token_strs": await self.service.token_texts(ids) if texts else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = json_object(await read_body(request))
        ids = token_ids("tokens", body.get("tokens"))
        text = await self.service.detokenize(
            ids,
            model=one(body, "model", string, ""),
            skip_special_tokens=one(body, "skip_special_tokens", boolean, False),
            field="tokens",
        )
        return json_response({"prompt": text})

    async def live(self, request: Request) -> Response:
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """503 when no verifier is ready or the gateway is draining. A missing drafter does not count."""
        ready = self.service.ready
        return json_response({"status": "ready" if ready else "not ready"}, status=200 if ready else 503)

    async def load(self, request: Request) -> Response:
        """How busy the gateway is. `server_load` is vLLM's name of the requests in it."""
        admission = self.service.admission
        running, waiting = admission.num_running, admission.num_waiting
        return json_response(
            {
                "server_load": running + waiting,
                "num_running": running,
                "num_waiting": waiting,
                "max_num_seqs": admission.max_num_seqs,
                "draining": admission.draining,
            }
        )

    async def version(self, request: Request) -> Response:
        return json_response({"version": rootward.__version__})

    async def openapi(self, request: Request) -> Response:
        return json_response(description())

    async def tokenizer_info(self, request: Request) -> Response:
        """vLLM's: special tokens and template, for clients that tokenise over /tokenize (lm-eval does)."""
        return json_response(dict(self.service.tokenizer.special_texts))

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def _card(self) -> dict[str, object]:
        return model_card(self.service.served_model, self.service.model, created=self._created)


async def _refused(request: Request, error: Exception) -> Response:
    log_bug(error)
    known = http_error(error)
    return json_response(known.body, status=known.status, headers=known.headers)


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = simple_error(error.status_code, "not_found", f"{request.method} {request.url.path}: {error.detail}")
    return json_response(known.body, status=known.status)
