"""Requests that are refused before the application sees them, and what they may hold until then."""

import asyncio
import gzip
import json
import ssl
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvloop
from starlette.responses import Response
from support.certificates import Authority

from gateway.auth import Access, Keys
from gateway.http_guard import BYTES_A_VALUE, LOCAL_HOSTS, MAX_CONTAINERS, MAX_MEMBERS, RequestGuard, for_web_pages
from gateway.settings import GatewaySettings
from rootward.keys import digest, new_key
from rootward.wire.auth import BytesInFlight
from rootward.wire.http_server import HttpServer
from rootward.wire.tls import ServerTls

LIMIT = 1 << 21
PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


class App:
    """Answers with the length of the body once `free` is set."""

    def __init__(self):
        self.free, self.num_calls = asyncio.Event(), 0
        self.free.set()

    async def __call__(self, scope, receive, send):
        self.num_calls += 1
        message = await receive()
        await self.free.wait()
        await Response(str(len(message["body"])))(scope, receive, send)


def guarded(app=None, *, limit=1000, budget=10_000, hosts=None):
    return RequestGuard(app or App(), max_body_bytes=limit, in_flight=BytesInFlight(budget), hosts=hosts)


async def post(guard, content=b"{}", headers=JSON, url="http://gateway"):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=url) as client:
        return await client.post(PATH, content=content, headers=headers)


def refusal(answer):
    error = answer.json()["error"]
    assert error["message"].startswith(error["param"])
    return answer.status_code, error["code"], error["param"]


async def test_a_body_reaches_the_application_up_to_its_limit():
    guard = guarded()
    assert (await post(guard, b"x" * 1000)).text == "1000"
    assert refusal(await post(guard, b"x" * 1001)) == (400, "invalid_value", "body")
    assert guard._in_flight.held == 0


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_long_is_not_read_to_its_end(declared):
    """Without a declared length at most one part beyond the limit is read, with one nothing."""
    app, num_read, sent = App(), 0, []
    length = [(b"content-length", b"1000000000")] if declared else []

    async def receive():
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "headers": [(b"content-type", b"application/json"), *length],
    }
    guard = guarded(app)
    await guard(scope, receive, send)
    assert (sent[0]["status"], app.num_calls, guard._in_flight.held) == (400, 0, 0)
    assert num_read == (0 if declared else 11)


async def test_without_a_key_nothing_of_a_body_is_read(tmp_path):
    path, sent = tmp_path / "keys.yaml", []
    path.write_text(f"keys: [{{name: a, sha256: {digest(new_key())}}}]")
    app = App()

    async def receive():
        raise AssertionError("the body is read")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"authorization", b"Bearer rw-wrong")]}
    await Access(Keys(path), ["demo"]).around(guarded(app))(scope, receive, send)
    assert (sent[0]["status"], app.num_calls) == (401, 0)


async def test_bodies_in_flight_share_a_budget_until_they_are_answered():
    app = App()
    guard = guarded(app, budget=1500)
    app.free.clear()
    first = asyncio.create_task(post(guard, b"x" * 1000))
    while not app.num_calls:
        await asyncio.sleep(0)
    assert guard._in_flight.held == 1000
    busy = await post(guard, b"x" * 501)
    assert (busy.status_code, busy.json()["error"]["code"], busy.headers["retry-after"]) == (
        429,
        "server_overloaded",
        "1",
    )
    app.free.set()
    assert (await first).text == "1000"
    assert guard._in_flight.held == 0
    assert (await post(guard, b"x" * 501)).text == "501"


@pytest.mark.parametrize(
    "bomb",
    [
        b"[" + b"[]," * MAX_CONTAINERS + b"[]]",
        b'[{"a":"' + b'"},{"a":"' * MAX_CONTAINERS + b'"}]',
        b"{" + b'"a":1,' * MAX_MEMBERS + b'"a":1}',
        b"[" + b"1," * (LIMIT // BYTES_A_VALUE + 1) + b"1]",
        b"[" + b'"",' * (LIMIT // BYTES_A_VALUE + 1) + b'""]',
    ],
    ids=["arrays", "objects", "members", "numbers", "strings"],
)
async def test_bodies_whose_parsing_would_hold_the_event_loop_are_refused_before_it(bomb):
    app = App()
    assert refusal(await post(guarded(app, limit=LIMIT, budget=1 << 24), bomb)) == (400, "invalid_value", "body")
    assert app.num_calls == 0


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
async def test_arrays_cannot_hide_in_an_encoding_with_wider_characters(encoding):
    """The bytes of an escaped quote are apart there, so that all that follows would look like a text."""
    app, bomb = App(), '{"user": "\\"", "prompt": [' + "[]," * (2 * MAX_CONTAINERS) + "[]]}"
    assert json.loads(bomb.encode(encoding))["user"] == '"'
    guard = guarded(app, limit=LIMIT, budget=1 << 24)
    assert refusal(await post(guard, bomb.encode(encoding))) == (400, "invalid_value", "body")
    assert app.num_calls == 0


async def test_a_compressed_body_is_refused_by_the_name_of_its_encoding():
    guard = guarded()
    told = await post(guard, gzip.compress(b"{}"), headers=JSON | {"content-encoding": "gzip"})
    assert refusal(told) == (400, "invalid_value", "content-encoding")
    assert (await post(guard, headers=JSON | {"content-encoding": "identity"})).status_code == 200


@pytest.mark.parametrize("text", ["[{,", '\\"[', "\\\\[", ', \\"x\\", {[', "\\[é,"])
async def test_brackets_and_commas_in_texts_do_not_count(text):
    guard = guarded(limit=LIMIT, budget=1 << 24)
    body = json.dumps({"prompt": text * (LIMIT // 40), "stop": ["x", '"']}).encode()
    assert body.count(b"[") > MAX_CONTAINERS
    assert (await post(guard, body)).status_code == 200
    ids = [1] * (LIMIT // BYTES_A_VALUE)
    assert (await post(guard, json.dumps(ids).encode())).status_code == 200


async def test_a_body_is_json_by_its_type():
    guard = guarded()
    for kind in ("application/json", "application/json; charset=utf-8", "Application/problem+json"):
        assert (await post(guard, headers={"content-type": kind})).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert refusal(await post(guard, headers={"content-type": kind})) == (400, "invalid_value", "content-type")
    assert (
        await post(guard, headers={})
    ).status_code == 200  # who may call at all has shown a key, or is no browser's page


async def test_a_refusal_has_the_id_of_its_request(tmp_path):
    """Whoever refuses it: the check of keys or the guard. An id that is no name is not repeated."""
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: a, sha256: {digest(new_key())}}}]")
    for app, refused in ((guarded(), {"content-type": "text/plain"}), (Access(Keys(path), ["demo"]).around(App()), {})):
        told = await post(app, headers=refused | {"x-request-id": "mine"})
        assert (told.status_code in (400, 401), told.headers.get("x-request-id")) == (True, "mine")
        assert (await post(app, headers=refused)).headers.get("x-request-id")
        assert "x-request-id" not in (await post(app, headers=refused | {"x-request-id": "a b"})).headers


async def test_web_pages_cannot_drive_a_gateway_on_loopback():
    """Neither by a name of their own that resolves to it, nor by a request that browsers send without asking."""
    guard = guarded(hosts=LOCAL_HOSTS)
    for url in (
        "http://localhost:8000",
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
        "http://0.0.0.0:8000",
        "http://LOCALHOST",
    ):
        assert (await post(guard, url=url)).status_code == 200
    for url in ("http://evil.example:8000", "http://localhost.evil.example", "http://192.168.0.1"):
        assert refusal(await post(guard, url=url)) == (403, "permission_denied", "host")
    assert refusal(await post(guard, headers={}, url="http://localhost")) == (400, "invalid_value", "content-type")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://evil.example") as client:
        assert (await client.get("/v1/models")).status_code == 403


@pytest.mark.parametrize(
    ("listen", "more", "guarded_names"),
    [
        ("127.0.0.1:8000", [], LOCAL_HOSTS),
        ("127.0.0.2:8000", [], LOCAL_HOSTS | {"127.0.0.2"}),
        ("[::1]:8000", [], LOCAL_HOSTS),
        ("0.0.0.0:8000", [], None),
        ("127.0.0.1:8000", ["--api-keys", "keys.yaml"], None),
    ],
)
def test_host_names_are_checked_on_loopback_without_keys(listen, more, guarded_names):
    settings = GatewaySettings.load(["--model", "tabular:x", "--http-listen", listen, *more], prog="gateway")
    assert settings.http_hosts == guarded_names


async def closed(reader):
    """The server has closed the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionError:
        return True


async def served(app=None, **options):
    """(address, stop) of a real server; `stop.until_left` waits until it has no connections."""
    server = HttpServer("127.0.0.1:0", **options)
    running = asyncio.create_task(server.run_until_stopped(app or guarded()))
    host, _, port = server.address.rpartition(":")
    while server._server is None or not server._server.started:
        await asyncio.sleep(0.01)

    async def stop():
        server.stop()
        await running

    async def until_left():
        while server._server.server_state.connections:
            await asyncio.sleep(0.01)

    stop.until_left, stop.server = until_left, server
    return (host, int(port)), stop


WHOLE = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "half"), [(b"", b""), (b"", b"POST /v1/comp"), (b"", WHOLE[:-2]), (WHOLE, b"POST"), (WHOLE, WHOLE[:-2])]
)
async def test_half_a_head_does_not_keep_a_connection(before, half):
    """Neither of the first request nor of a later one."""
    address, stop = await served(head_timeout_s=0.5)
    reader, writer = await asyncio.open_connection(*address)
    if before:
        writer.write(before)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n0")
    writer.write(half)
    assert await closed(reader)
    writer.close()
    await stop()


@pytest.mark.slow  # waits for real time: the limit is that of the HTTP server
async def test_an_idle_connection_is_kept_longer_than_clients_keep_it():
    """httpx, and with it the openai package, uses a connection again that has been idle for less than 5 s, and has lost the request if the
    server closes it at that moment."""
    address, stop = await served(head_timeout_s=0.2)
    reader, writer = await asyncio.open_connection(*address)
    for idle_s in (5.5, 0):
        writer.write(WHOLE)
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), 60)
        await asyncio.sleep(idle_s)
    writer.close()
    await stop()


def test_a_tls_connection_may_send_as_soon_as_it_is_open(tmp_path):
    """uvloop reads a first time before the server has asked for TLS."""
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=str(authority.file))

    async def one(address):
        reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost")
        writer.write(WHOLE)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), 60)
        writer.close()
        return b"200 OK" in answer

    async def many():
        address, stop = await served(tls=ServerTls(authority.issue("gateway"), mutual=False))
        with ThreadPoolExecutor(8) as threads:  # clients that do not take turns with the server
            loop = asyncio.get_running_loop()
            found = await asyncio.gather(
                *(loop.run_in_executor(threads, asyncio.run, one(address)) for _ in range(100))
            )
        await stop()
        return found

    assert uvloop.run(many()) == [True] * 100


async def test_a_slow_answer_is_no_half_request():
    app = App()
    app.free.clear()
    server = HttpServer("127.0.0.1:0", head_timeout_s=0.5)
    running = asyncio.create_task(server.run_until_stopped(guarded(app)))
    async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=20) as client:
        asking = asyncio.create_task(client.post(PATH, content=b"{}", headers=JSON))
        while not app.num_calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)  # three times as long as a head may take
        app.free.set()
        assert (await asking).text == "2"
    server.stop()
    await running


async def large_answer(scope, receive, send):
    """More than the buffers of the system take."""
    body = b"x" * (64 << 20)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("requests", [WHOLE, 2 * WHOLE])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_answer_that_is_not_read_does_not_keep_a_connection(tmp_path, run, secure, requests):
    """It held its bytes and the connection for ever, and a second request on it the bytes of its body as well."""
    authority = Authority(tmp_path)

    async def unread():
        tls = ServerTls(authority.issue("gateway"), mutual=False) if secure else None
        context = ssl.create_default_context(cafile=str(authority.file)) if secure else None
        address, stop = await served(large_answer, tls=tls, unread_s=0.3)
        reader, writer = await asyncio.open_connection(
            *address, ssl=context, server_hostname="localhost" if secure else None, limit=1024
        )
        writer.write(requests)
        assert await reader.read(1)
        writer.transport.pause_reading()
        await stop.until_left()
        writer.transport.abort()
        await stop()

    run(asyncio.wait_for(unread(), 60))


async def test_an_answer_that_is_read_slowly_arrives():
    address, stop = await served(large_answer, unread_s=1e6)
    reader, writer = await asyncio.open_connection(*address, limit=1 << 16)
    writer.write(WHOLE)
    await reader.readuntil(b"\r\n\r\n")
    (connection,) = stop.server._server.server_state.connections
    for _ in range(16):  # each time some more was read
        assert len(await reader.readexactly(4 << 20)) == 4 << 20
        connection._check_unread()
    writer.close()
    await stop()


async def test_connections_beyond_the_limit_are_closed():
    address, stop = await served(max_connections=3)
    held = [await asyncio.open_connection(*address) for _ in range(3)]
    for _, writer in held:
        writer.write(WHOLE[:-2])
    extra, _ = await asyncio.open_connection(*address)
    assert await closed(extra)
    held[0][1].close()
    for _ in range(600):  # until the server has seen that, too
        reader, writer = await asyncio.open_connection(*address)
        writer.write(WHOLE)
        try:
            if b"200" in await reader.readline():
                break
        except ConnectionError:
            pass
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("a place that became free is not given again")
    await stop()


async def test_a_connection_that_asks_for_a_websocket_gives_its_place_back():
    """uvicorn serves websockets where a package for them is installed, by another protocol, which knows nothing of the limit."""
    address, stop = await served(max_connections=1)
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    reader, writer = await asyncio.open_connection(*address)
    writer.write(WHOLE.replace(b"\r\n", b"\r\n" + upgrade, 1))
    await reader.readline()
    writer.close()
    for _ in range(600):  # until the server has seen that
        reader, writer = await asyncio.open_connection(*address)
        writer.write(WHOLE)
        try:
            if b"200" in await reader.readline():
                break
        except ConnectionError:
            pass
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("its place is not given again")
    await stop()


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01"])
async def test_half_a_handshake_does_not_keep_a_connection_and_counts_as_one(tmp_path, hello):
    authority = Authority(tmp_path)
    files = authority.issue("gateway")
    tls = ServerTls(files, mutual=False)
    address, stop = await served(tls=tls, head_timeout_s=2.0, max_connections=2)
    held = [await asyncio.open_connection(*address) for _ in range(2)]
    for _, writer in held:
        writer.write(hello)
    extra, _ = await asyncio.open_connection(*address)
    assert await closed(extra)
    for reader, _ in held:
        assert await closed(reader)
    trust = ssl.create_default_context(cafile=str(authority.file))
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{address[1]}", verify=trust) as client:
        assert (await client.post(PATH, content=b"{}", headers=JSON)).text == "2"
    await stop()


async def test_renewed_certificates_are_taken_up_and_half_a_renewal_changes_nothing(tmp_path):
    async def status(trusted):
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{address[1]}", verify=trusted) as client:
            return (await client.post(PATH, content=b"{}", headers=JSON)).status_code

    old = Authority(tmp_path)
    files = old.issue("gateway")
    key, trust_old = files.key.read_bytes(), ssl.create_default_context(cafile=str(old.file))
    address, stop = await served(tls=ServerTls(files, mutual=False))
    assert await status(trust_old) == 200
    await asyncio.sleep(1.1)  # the files are looked at once a second
    new = Authority(tmp_path)
    new.issue("gateway")
    new_key = files.key.read_bytes()
    files.key.write_bytes(key)  # the certificate is the new one, its key still that of the old one
    assert await status(trust_old) == 200
    files.key.write_bytes(new_key)
    assert await status(ssl.create_default_context(cafile=str(new.file))) == 200
    await stop()


@pytest.mark.parametrize(
    ("origins", "origin", "may"),
    [
        (["https://chat.example"], "https://chat.example", True),
        (["https://chat.example"], "https://other.example", False),
        (["*"], "https://other.example", True),
        ([], "https://chat.example", False),
    ],
)
async def test_scripts_of_web_pages_may_call_if_their_origin_is_allowed(origins, origin, may, tmp_path):
    """A browser asks first, without a key, and then gives a script the answer only if its origin is named in it."""
    path, right = tmp_path / "keys.yaml", new_key()
    path.write_text(f"keys: [{{name: a, sha256: {digest(right)}}}]")
    app = for_web_pages(Access(Keys(path), ["demo"]).around(guarded()), origins)
    key = {"authorization": f"Bearer {right}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        first = await client.options(PATH, headers={"origin": origin} | asked)
        then = await client.post(PATH, content=b"{}", headers=JSON | key | {"origin": origin})
        refused = await client.post(PATH, content=b"{}", headers=JSON | {"origin": origin})
    assert (first.status_code == 200) is may
    assert [("access-control-allow-origin" in answer.headers) for answer in (first, then, refused)] == [may] * 3
    assert then.text == "2"
    assert refused.status_code == 401, "an origin is no key"
    assert not may or "x-request-id" in then.headers["access-control-expose-headers"]


def test_an_origin_has_a_scheme_and_a_host():
    assert (
        GatewaySettings(model="m", http_allowed_origins="https://a, http://b:1,*").http_allowed_origins[1]
        == "http://b:1"
    )
    for wrong in ("a.example", "https://a/page", "ftp://a", "https://"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no origin"):
            GatewaySettings(model="m", http_allowed_origins=wrong)
