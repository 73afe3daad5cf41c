"""How long to wait before the next attempt: pure, and spread so that a herd does not come back as one."""

from __future__ import annotations

from hashlib import blake2b


def jittered(seconds: float, *who: object) -> float:
    """Between 0.5 and 1.5 times `seconds`. who: names of worker, peer, attempt; different ones are spread, the same agree."""
    digest = blake2b("\0".join(map(str, who)).encode(), digest_size=8).digest()
    return seconds * (0.5 + int.from_bytes(digest, "little") / 2**64)


def backoff_s(attempt: int, first_s: float, longest_s: float, *who: object) -> float:
    """Doubles with each attempt (0, 1, …) up to longest_s, jittered."""
    return jittered(min(first_s * 2.0 ** min(attempt, 62), longest_s), *who, attempt)
