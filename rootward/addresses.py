"""Network addresses as strings: host:port, an IPv6 host in brackets, or unix:PATH."""

from __future__ import annotations

import socket

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
    return host == "localhost" or host == "::1" or host.startswith("127.") or address.startswith("unix:")


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
