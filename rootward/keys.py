"""API keys as strings: how one is made, and what a server stores of it."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "rw-"


def new_key() -> str:
    """A fresh key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """What is stored of a key: SHA-256 in hex. Enough for 256 random bits; a password would need a slow hash."""
    return hashlib.sha256(key.encode()).hexdigest()
