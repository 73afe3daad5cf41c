"""The address that a worker tells its peers."""

from __future__ import annotations

import socket

import pytest

from rootward.addresses import advertised
from rootward.errors import ConfigurationError

V4, V6 = "10.0.0.7", "fd00::7"


@pytest.fixture
def known(monkeypatch):
    """Gives this machine's name some addresses, and nothing else."""

    def know(*addresses: str) -> None:
        def look_up(host, port, family=socket.AF_UNSPEC, *_, **__):
            families = {a: socket.AF_INET6 if ":" in a else socket.AF_INET for a in addresses}
            found = [(f, socket.SOCK_STREAM, 6, "", (a, 0)) for a, f in families.items() if family in (0, f)]
            if not found:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return found

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(socket, "gethostbyname", lambda host: look_up(host, None, socket.AF_INET)[0][4][0])

    return know


@pytest.mark.parametrize(
    ("addresses", "listens", "dialled"),
    [
        ([V6], "[::]:50061", f"[{V6}]:50061"),
        ([V6, V4], "[::]:50061", f"{V4}:50061"),  # both are listened on, and peers without IPv6 can dial this one
        ([V6, V4], "0.0.0.0:50061", f"{V4}:50061"),
        ([], "[fd00::9]:50061", "[fd00::9]:50061"),
        ([], "drafter-0.example:50061", "drafter-0.example:50061"),
    ],
)
def test_peers_get_an_address_that_they_can_dial(known, addresses, listens, dialled):
    known(*addresses)
    assert advertised(listens) == dialled


@pytest.mark.parametrize(("addresses", "listens"), [([], "[::]:1"), ([V6], "0.0.0.0:1")])
def test_a_machine_without_such_an_address_is_refused_with_the_fix(known, addresses, listens):
    known(*addresses)
    with pytest.raises(ConfigurationError, match="advertise: "):
        advertised(listens)
