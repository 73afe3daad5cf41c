"""API keys: making one, and its stored form."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "rw-"


def new_key() -> str:
    """A fresh key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """The stored form of a key: SHA-256 in hex. Enough for 256 random bits; a password would need a slow hash."""
    return hashlib.sha256(key.encode()).hexdigest()
