"""The record of a request as the session store has it, read without taking the request over."""

from __future__ import annotations

from gateway.redis_store import RedisStore, Store
from gateway.session_store import Record, Run


async def record_of(store: Store, request_id: str) -> Record:
    """Empty if the store does not know the request."""
    if isinstance(store, RedisStore):
        key, _, _, log = store._request_keys(request_id)
        async with store._answering():
            fields, items = await store._client.hgetall(key), await store._client.lrange(log, 0, -1)
        return Record(dict(fields), Run.joined(items))
    store._forget_expired()
    stored = store._requests.get(request_id)
    return Record(dict(stored.fields), stored.log) if stored else Record()
