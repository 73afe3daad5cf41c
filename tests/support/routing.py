"""A deployment of verifiers, simulated: slots, prefix caches and time under a routing policy. Router and hints are the real ones.

A trace is what a gateway could record of its requests: when each came, which text its prompt shares with which others, how long it is and
how much was generated. One line of JSON a request: [second, conversation, [[part, tokens], …], output tokens]; a part is a piece of text by
name, so that equal names are equal tokens. `tests/data/routing_trace.jsonl` is made by rule: chats under three system prompts whose prompts
grow with every turn, questions on six documents, and prompts of their own.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import cast

from gateway.router import BLOCK, Prefixes, PrefixKeys, Upstream, choose, tokens_held
from rootward.core.requests import VerifierRequest
from rootward.engine.prefix_keys import chain, first_key
from rootward.ports import ModelInfo, Verifier, VerifierInfo

PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 4000.0, 40.0
SLOTS, CACHE_BLOCKS = 8, 1200


@dataclass(frozen=True)
class Asked:
    at_s: float
    conversation: str
    prompt: tuple[int, ...]
    num_output: int


def read_trace(file: Path) -> list[Asked]:
    return [_asked(*json.loads(line)) for line in file.read_text().splitlines()]


def _asked(at_s: float, conversation: str, parts: Sequence[tuple[str, int]], num_output: int) -> Asked:
    prompt = itertools.chain.from_iterable(_tokens(name, count) for name, count in parts)
    return Asked(at_s, conversation, tuple(prompt), num_output)


def _tokens(name: str, count: int) -> list[int]:
    rng = Random(name)
    return [rng.randrange(50_000) for _ in range(count)]


@dataclass
class Simulated:
    """A verifier: as many requests at once as it has slots, the rest in line; KV of the blocks it computed last."""

    name: str
    running: int = 0
    line: list[tuple[float, Asked]] = field(default_factory=list)
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def upstream(self) -> Upstream:
        return upstream(self.name, num_running=self.running, num_waiting=len(self.line), max_sessions=SLOTS)

    def prefill(self, keys: Sequence[bytes]) -> int:
        """Tokens found in the cache; all of them are in it afterwards."""
        found = next((i for i, key in enumerate(keys) if key not in self.cache), len(keys))
        for key in keys:
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)
        return found * BLOCK


def upstream(
    name: str, ready: bool = True, *, num_in_flight: int = 0, lost_at: float = -math.inf, **reported: int
) -> Upstream:
    """A verifier as a gateway knows it, with the load that it has reported."""
    info = VerifierInfo(ModelInfo("m", 1, 1), **reported)
    return Upstream(name, cast(Verifier, None), info, answers=ready, num_in_flight=num_in_flight, lost_at=lost_at)


@dataclass
class Outcome:
    hit_rate: float  # of prompt tokens
    first_token_s: float  # mean time to the first token
    late_first_token_s: float  # 95th percentile of it
    spread: float  # most requests of a verifier over the mean


Policy = Callable[[Sequence[Upstream], Asked, dict[str, int]], str]


def round_robin() -> Policy:
    turn = itertools.count()
    return lambda upstreams, asked, held: upstreams[next(turn) % len(upstreams)].name


def least_load() -> Policy:
    return lambda upstreams, asked, held: choose(upstreams, str(asked.at_s), now=0.0).upstream.name


def ours() -> Policy:
    return lambda upstreams, asked, held: choose(upstreams, asked.conversation, held=held, now=0.0).upstream.name


def is_held(process: str, age_s: float) -> bool:
    return True


def simulate(trace: Iterable[Asked], policy: Policy, num_verifiers: int = 4) -> Outcome:
    now = 0.0
    verifiers = {f"v{i}": Simulated(f"v{i}") for i in range(num_verifiers)}
    hints, firsts, counts = Prefixes(lambda: now, is_held), [], dict.fromkeys(verifiers, 0)
    events: list[tuple[float, int, str, Asked | None]] = []  # an arrival, or (asked None) the end of one at a verifier
    order = itertools.count()
    num_found = num_tokens = 0
    for asked in trace:
        heapq.heappush(events, (asked.at_s, next(order), "", asked))

    def start(verifier: Simulated, came_s: float, asked: Asked) -> None:
        nonlocal num_found, num_tokens
        verifier.running += 1
        found = verifier.prefill(chain(first_key("m", ""), asked.prompt, BLOCK, len(asked.prompt) // BLOCK))
        num_found, num_tokens = num_found + found, num_tokens + len(asked.prompt)
        first_s = now + (len(asked.prompt) - found) / PREFILL_TOKENS_PER_S
        firsts.append(first_s - came_s)
        heapq.heappush(events, (first_s + asked.num_output / DECODE_TOKENS_PER_S, next(order), verifier.name, None))

    while events:
        now, _, name, asked = heapq.heappop(events)
        if asked is not None:
            keys = PrefixKeys("m", VerifierRequest("r", asked.prompt)).keys
            upstreams = [v.upstream() for v in verifiers.values()]
            name = policy(upstreams, asked, tokens_held(hints.holders(keys), is_held))
            hints.sent(keys, f"{name}@1")
            counts[name] += 1
            verifiers[name].line.append((now, asked))
        else:
            verifiers[name].running -= 1
        verifier = verifiers[name]
        while verifier.line and verifier.running < SLOTS:
            start(verifier, *verifier.line.pop(0))
    firsts.sort()
    mean_count = sum(counts.values()) / num_verifiers
    late = firsts[int(0.95 * len(firsts))]
    return Outcome(num_found / num_tokens, sum(firsts) / len(firsts), late, max(counts.values()) / mean_count)
