"""Keys of committed blocks: equal keys mean equal keys and values.

What a block holds depends on its tokens and all before them, on the weights, and on nothing else; so the key of a block is a hash of its
parent's key and its tokens, and the chain starts from the model's fingerprint and a salt. Sessions with different salts share nothing,
not even the time a hit saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16


def first_key(fingerprint: str, salt: str) -> bytes:
    """What the chain of a session starts from."""
    return blake2b(f"{len(fingerprint)}:{fingerprint}{salt}".encode(), digest_size=DIGEST_BYTES).digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block of these tokens below `parent`."""
    return blake2b(parent + np.asarray(tokens, dtype="<i8").tobytes(), digest_size=DIGEST_BYTES).digest()


def chain(first: bytes, tokens: Sequence[int], block_size: int, num_blocks: int) -> list[bytes]:
    """The keys of the first `num_blocks` blocks of a text."""
    keys = [first]
    for i in range(num_blocks):
        keys.append(next_key(keys[-1], tokens[i * block_size : (i + 1) * block_size]))
    return keys[1:]
