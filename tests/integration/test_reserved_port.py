"""A port that is kept for a server until it listens."""

from __future__ import annotations

import socket
import sys

import pytest

from rootward.addresses import reserved_port
from rootward.wire.http_server import bind


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a bound port cannot be bound again")
def test_only_a_server_that_is_told_the_port_gets_it() -> None:
    with reserved_port() as port:
        for _ in range(2):  # it may restart
            with bind(f"127.0.0.1:{port}", "listen") as server, socket.socket() as client, socket.socket() as other:
                server.listen()
                client.connect(("127.0.0.1", port))
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may still end
        other.bind(("127.0.0.1", port))
