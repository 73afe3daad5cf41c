"""Time until the next attempt: exponential backoff with jitter, so that many clients of one server do not retry at the same moment."""

from __future__ import annotations

from hashlib import blake2b


def jittered(seconds: float, *names: object) -> float:
    """Between 0.5 and 1.5 times `seconds`, as a pure function of `names` (of worker, peer, attempt)."""
    digest = blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    return seconds * (0.5 + int.from_bytes(digest, "little") / 2**64)


def backoff_s(attempt: int, first_s: float, longest_s: float, *names: object) -> float:
    """Doubles with each attempt (0, 1, …) up to longest_s, jittered."""
    return jittered(min(first_s * 2.0 ** min(attempt, 62), longest_s), *names, attempt)
