"""uvicorn in the event loop of a service, which owns the signals, the port and the certificates."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rootward.addresses import join_host_port, split_host_port
from rootward.errors import ConfigurationError
from rootward.wire.tls import ServerTls

GRACE_S = 2  # for idle connections at the end; requests have been drained before
HEAD_TIMEOUT_S = 10.0  # for the head of a request to arrive, from its first byte or from the start of the connection
KEEP_ALIVE_S = 75.0  # of an idle connection: longer than clients reuse theirs (httpx 5 s, proxies 60 s), or requests are lost at its end
MAX_CONNECTIONS = 1024
UNREAD_S = 120.0  # in which a client must take MIN_READ bytes of what waits for it; otherwise its connection is closed
MIN_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class _Limits:
    """Of connections: their number, and seconds for the head of a request and for reading an answer."""

    max_connections: int
    head_timeout_s: float
    unread_s: float


class HttpServer:
    """Binds at once, so that a port in use is found at start; serves an application until `stop`."""

    def __init__(
        self,
        address: str,
        *,
        setting: str = "http_listen",
        tls: ServerTls | None = None,
        max_connections: int = MAX_CONNECTIONS,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        unread_s: float = UNREAD_S,
    ):
        self._tls = tls
        self._limits = _Limits(max_connections, head_timeout_s, unread_s)
        self._socket = bind(address, setting)
        self.address = join_host_port(*self._socket.getsockname()[:2])
        self._server: uvicorn.Server | None = None

    async def run_until_stopped(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",  # websockets are served by another protocol, which would not leave `held`
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            http=_protocol(self._tls, self._limits),
        )
        self._server = _Server(config)
        await self._server.serve(sockets=[self._socket])

    @property
    def scheme(self) -> str:
        return "https" if self._tls else "http"

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True


class _Server(uvicorn.Server):  # type: ignore[misc]  # uvicorn's types are not followed
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, which drains before it stops this server."""
        yield


def _protocol(tls: ServerTls | None, limits: _Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which closes connections beyond a number, those whose request does not arrive or whose answer is not read, and,
    where there are `peers`, those of certificates without one of these names: the rule of `peers_only`, for HTTP.

    It asks for TLS itself, so that connections in the middle of a handshake are counted and timed as well."""
    held: set[asyncio.Protocol] = set()
    peers = tls.peers if tls else ()
    current_context = _renewed_contexts(tls) if tls else None

    class Guarded(AutoHTTPProtocol):  # type: ignore[misc]
        _late: asyncio.TimerHandle | None = None  # while a head is awaited
        _securing: asyncio.Task[None] | None = None
        _established = False  # passed on to uvicorn
        _early = b""  # received before TLS was started, or before this side knew that the handshake was over
        _reading: asyncio.TimerHandle | None = None  # the next check of the bytes that wait for the client
        _num_unread = 0  # bytes that waited at the last check
        _all_taken = False  # no byte waited at some moment since then

        def connection_made(self, transport: asyncio.Transport) -> None:
            self._raw = transport
            # This protocol is told when any byte begins to wait, and when none waits any more.
            transport.set_write_buffer_limits(high=1, low=0)
            held.add(self)
            self._late = self.loop.call_later(limits.head_timeout_s, transport.abort)
            if len(held) > limits.max_connections:
                transport.abort()
            elif current_context is None:
                self._establish(transport)
            else:
                self._securing = self.loop.create_task(self._secure(transport, current_context()))

        async def _secure(self, raw: asyncio.Transport, context: ssl.SSLContext) -> None:
            raw.pause_reading()  # uvloop begins to read after `connection_made`, whatever was asked there
            handshake = self.loop.create_task(self.loop.start_tls(raw, self, context, server_side=True))
            await asyncio.sleep(0)  # it reads from the next turn of the loop on
            if self._early:
                self.loop.call_soon(_feed, raw.get_protocol(), self._taken_early())
            transport = None
            with contextlib.suppress(OSError, ssl.SSLError):
                transport = await handshake
            if transport is None or raw.is_closing():  # asyncio does not report connections lost in the handshake
                raw.abort()
                self.connection_lost(None)
            else:
                self._establish(transport)
                if self._early:
                    self.data_received(self._taken_early())

        def _taken_early(self) -> bytes:
            early = self._early
            self._early = b""
            return early

        def _establish(self, transport: asyncio.Transport) -> None:
            self._established = True
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=1, low=0)
            self._reading = self.loop.call_later(limits.unread_s, self._check_unread)
            if peers:
                certificate = transport.get_extra_info("peercert") or {}
                if not {name for _, name in certificate.get("subjectAltName", ())}.intersection(peers):
                    transport.abort()

        def data_received(self, data: bytes) -> None:
            if not self._established:
                self._early += data
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._late is None:  # the first bytes of another request of this connection
                self._late = self.loop.call_later(limits.head_timeout_s, self._raw.abort)

        def resume_writing(self) -> None:
            self._all_taken = True
            super().resume_writing()

        def _check_unread(self) -> None:
            """Close the connection if the client has taken less than MIN_READ of the bytes that waited at the last check. Otherwise a
            client that does not read would hold them and the connection for ever: also a closed one waits until all is taken."""
            transports = {self._raw, self.transport}
            num_unread = sum(transport.get_write_buffer_size() for transport in transports)
            if num_unread and not self._all_taken and 0 < self._num_unread < num_unread + MIN_READ:
                self._raw.abort()
                return
            self._num_unread, self._all_taken = num_unread, False
            self._reading = self.loop.call_later(limits.unread_s, self._check_unread)

        def connection_lost(self, exc: Exception | None) -> None:
            held.discard(self)
            self._stop_waiting()
            if self._reading is not None:
                self._reading.cancel()
            if self._established:
                super().connection_lost(exc)

        def _stop_waiting(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Guarded


def _feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    while data:
        buffer = memoryview(protocol.get_buffer(len(data)))
        num = min(len(buffer), len(data))
        buffer[:num] = data[:num]
        protocol.buffer_updated(num)
        data = data[num:]


def _tls_context(tls: ServerTls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files = tls.certificates
    try:
        context.load_cert_chain(files.certificate, files.key)
        if tls.mutual:
            context.load_verify_locations(files.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        message = f"tls_certificate: {str(files.certificate)!r} and tls_key do not load ({error}); check that they belong together"
        raise ConfigurationError(message) from None
    return context


def _renewed_contexts(tls: ServerTls) -> Callable[[], ssl.SSLContext]:
    """Returns the context for a new connection, another one once the certificates have been renewed. A certificate whose key has not been
    replaced yet does not load and is tried again."""
    watched = tls.certificates.watch()
    context, pending = _tls_context(tls), False

    def current() -> ssl.SSLContext:
        nonlocal context, pending
        if pending := watched.changed() or pending:
            with contextlib.suppress(ConfigurationError):
                context, pending = _tls_context(tls), False
        return context

    return current


def bind(address: str, setting: str) -> socket.socket:
    """A bound socket. ConfigurationError, naming the setting, if the address is in use or not of this machine."""
    host, port = split_host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        message = f"{setting}: {address!r} cannot be bound ({error.strerror or error}); choose another address or stop its owner"
        raise ConfigurationError(message) from error
    return made
