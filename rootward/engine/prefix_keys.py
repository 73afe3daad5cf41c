"""Keys of committed blocks in the prefix cache: blocks with equal keys hold equal keys and values.

The content of a block depends only on the weights, its tokens and all tokens before them. So the key of a block is a hash of its parent's
key and its tokens; the first parent is a hash of the model's fingerprint and a salt. Sessions with different salts share no block, so a
tenant cannot measure whether another one's text is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16


def first_key(fingerprint: str, salt: str) -> bytes:
    """The parent key of a text's first block."""
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
