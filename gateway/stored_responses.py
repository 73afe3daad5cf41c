"""Stored answers of /v1/responses, for `previous_response_id` and GET. Each belongs to a tenant and expires; sizes and numbers are bounded,
and a tenant's oldest answers make room for new ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import orjson
import structlog
from pydantic import TypeAdapter

from gateway.auth import caller
from gateway.planning import check_name
from gateway.redis_store import Store
from gateway.requests import of_tenant
from gateway.schemas import Message
from gateway.session_store import MemoryStore, StoreUnavailable
from rootward.errors import NotFound

log = structlog.get_logger()

ID_PREFIX = "resp_"  # before the id of the request
LIFETIME_S = 3600.0
MAX_RESPONSES = 256  # of a tenant
MAX_BYTES = 1 << 18  # of one, with its conversation


class ResponseNotFound(NotFound):
    reason = "RESPONSE_NOT_FOUND"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the conversation that another request may continue: with the answer, without instructions."""

    answer: dict[str, object]
    messages: list[Message]


_STORED = TypeAdapter(StoredResponse)


class ResponseStore:
    """lifetime_s: 0 = nothing is stored. max_responses: of one tenant. max_bytes: of one response with its conversation."""

    def __init__(
        self,
        store: Store | None = None,
        *,
        lifetime_s: float = LIFETIME_S,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ):
        self._store = store or MemoryStore()
        self._lifetime_s, self._max_responses, self._max_bytes = lifetime_s, max_responses, max_bytes

    async def keep(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        """Whether it was stored. It is not if it is too large or the store does not answer, and the client gets its answer all the same."""
        if not self._lifetime_s:
            return False
        # Log-probabilities are JSON already, which pydantic does not know. In a thread, because they may be many: others run before it and
        # after it.
        answer = await asyncio.to_thread(orjson.dumps, response.answer)
        if len(answer) > self._max_bytes:
            return False
        text = _STORED.dump_json(replace(response, answer=orjson.loads(answer)), exclude_defaults=True)
        if len(text) > self._max_bytes:
            return False
        try:
            await self._store.put_response(
                _space(tenant),
                of_tenant(tenant, response_id),
                text.decode(),
                ttl_s=self._lifetime_s,
                max_responses=self._max_responses,
            )
        except StoreUnavailable as error:
            log.warning("response_not_stored", error=str(error))
            return False
        return True

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """ResponseNotFound if this tenant has none of this id; Unavailable while the store does not answer."""
        check_name("response_id", response_id.removeprefix(ID_PREFIX))
        text = await self._store.response(_space(tenant), of_tenant(tenant, response_id))
        if text is None:
            raise self._not_found(response_id)
        return _STORED.validate_json(text)

    async def delete(self, tenant: str, response_id: str) -> None:
        """ResponseNotFound if this tenant has none of this id."""
        check_name("response_id", response_id.removeprefix(ID_PREFIX))
        if not await self._store.delete_response(_space(tenant), of_tenant(tenant, response_id)):
            raise self._not_found(response_id)

    def _not_found(self, response_id: str) -> ResponseNotFound:
        fix = (
            "is not stored; it has expired, was deleted, made room for newer ones, or was not stored at all, as one that has more than "
            f"{self._max_bytes} bytes with its conversation (max_stored_response_bytes): send the conversation in input"
        )
        return ResponseNotFound(f"response_id: {response_id!r} {fix}", metadata={"field": "response_id"})


def _space(tenant: str) -> str:
    """The space in which the responses of a tenant count. Clients without keys name their tenants themselves, and share one space."""
    return "" if caller() is None else tenant
