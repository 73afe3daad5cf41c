"""Who holds the KV of which prompts: hints that gateways share, by hashes of prompt blocks.

A block is `BLOCK` tokens and everything before them, so one key stands for a whole prefix; its key also depends on the model and on the
tenant, who shares cached prefixes with nobody. Hints are only hints: the verifier's own cache decides what is really there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from rootward.engine.prefix_keys import chain, first_key

BLOCK = 32  # tokens
MAX_BLOCKS = 64  # of one prompt that are looked at
MAX_KNOWN = 65536  # blocks this gateway remembers
TTL_S = 300.0

Holders = Mapping[str, float]  # verifier → when it was last known to hold a block, in seconds


def block_keys(fingerprint: str, tenant: str, prompt: Sequence[int]) -> list[str]:
    """Keys of the full blocks of a prompt, the shortest prefix first."""
    count = min(len(prompt) // BLOCK, MAX_BLOCKS)
    return [key.hex() for key in chain(first_key(fingerprint, tenant), prompt, BLOCK, count)] if count else []


def tokens_held(holders: Sequence[Holders]) -> dict[str, int]:
    """Tokens of a prompt that each verifier holds, from who holds its blocks in order: a prefix without a gap counts."""
    held: dict[str, int] = {}
    for number, names in enumerate(holders):
        for name in names:
            if held.get(name, 0) == number * BLOCK:
                held[name] = (number + 1) * BLOCK
    return held


class Prefixes:
    """What this gateway knows itself. `now` is in seconds. `unpublished` is what other gateways do not know yet."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._known: OrderedDict[str, dict[str, float]] = OrderedDict()  # least recently used first
        self.unpublished: dict[str, list[str]] = {}  # verifier → keys

    def sent(self, keys: Sequence[str], verifier: str) -> None:
        """A prompt of these blocks went to a verifier, so it holds them soon."""
        fresh = self._now()
        for key in keys:
            holders = self._known.setdefault(key, {})
            if fresh - holders.get(verifier, -TTL_S) > TTL_S / 2:
                self.unpublished.setdefault(verifier, []).append(key)
                holders[verifier] = fresh
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def holders(self, keys: Sequence[str]) -> list[Holders]:
        """Of each block."""
        oldest = self._now() - TTL_S
        found = (self._known.get(key, {}) for key in keys)
        return [{name: at for name, at in holders.items() if at > oldest} for holders in found]

    def forget(self, verifier: str) -> None:
        """It has started anew, and holds nothing."""
        for holders in self._known.values():
            holders.pop(verifier, None)
        self.unpublished.pop(verifier, None)

    def take_unpublished(self) -> dict[str, list[str]]:
        taken, self.unpublished = self.unpublished, {}
        return taken
