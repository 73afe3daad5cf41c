"""Network addresses as strings: host:port, with an IPv6 host in brackets."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rootward.errors import ConfigurationError


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Inverse of `join_host_port`. ValueError without a port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can connect to a server that listens on this address."""
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host == "::1" or host.startswith("127.")


def open_local(request: str | urllib.request.Request, *, timeout_s: float | None = None) -> Any:
    """As `urllib.request.urlopen`, of a server on this machine: never through the proxy of http_proxy in the environment."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return direct.open(request, timeout=timeout_s)


def advertised(address: str) -> str:
    """The address that peers dial for a listening address: itself, or for a wildcard an address of this machine's name, IPv4 if it has one.
    ConfigurationError if it has none."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in ("0.0.0.0", "::", ""):
        return address
    name = socket.gethostname()
    family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
    try:
        found = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigurationError(
            f"advertise: is empty, and this machine's name {name} has no address for {address} ({error}); name what peers dial"
        ) from error
    return join_host_port(min((str(info[4][0]) for info in found), key=lambda own: ":" in own), int(port))


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 for a server that starts within the block.

    On Linux no other process gets it by chance, even before the server listens and while it restarts: a bound socket keeps it from those
    that ask for any port or connect, but not from a server that is told the port and sets SO_REUSEADDR or SO_REUSEPORT, as servers do.
    Elsewhere it is a port that was free at the time of the call."""
    with socket.socket() as held:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        if sys.platform != "linux":
            held.close()
        yield port
