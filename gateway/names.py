"""Request and session ids as the gateway keeps them: a client chooses its own, and no tenant meets those of another."""

from __future__ import annotations

from urllib.parse import quote


def of_tenant(tenant: str, name: str) -> str:
    """What an id of this tenant goes by in the gateway, in the store and at verifiers. Neither part can hold the blank between them."""
    return f"{quote(tenant, safe='')} {name}" if tenant else name


def as_chosen(name: str) -> str:
    """The id as its client knows it."""
    return name.rpartition(" ")[2]
