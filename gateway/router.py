"""Routing: the verifiers that a gateway knows, the prefixes that they hold, and the choice of one for a request.

    cost of a verifier = load  −  value of the part of the prompt whose KV it holds

Load is requests per session slot. Computed KV saves prefill, the more the longer it is, but is never worth more than `KV_WORTH` of a
verifier's slots, so that a warm cache does not draw all requests to one verifier.

Hints on held prefixes are hashes, which gateways share through the session store. Prefixes have fixed lengths, four in each doubling
(`prefix_lengths`), so a long prompt has few keys. A key also depends on the model, the tenant and the cache salt, as cached prefixes do. A
hint names the process that computed the prefix and counts until that process ends or evicts the prefix: verifiers report how long unused
text stays in their cache (`kv_evicted_age_s`), and older hints are ignored until they expire.

Verifiers are listed or discovered, and asked for their state once a second. One that hangs keeps its connections open and does not end its
streams; if polls fail and nothing is committed meanwhile, they are taken from it once another verifier is ready.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

import structlog

from rootward.core.requests import VerifierRequest
from rootward.discovery.polling import follow
from rootward.engine.prefix_keys import chain, first_key
from rootward.errors import RootwardError, ServiceError, Unavailable, first_line
from rootward.ports import Discovery, ModelInfo, Peer, Verifier, VerifierInfo
from rootward.wire.clients import RemoteVerifier

log = structlog.get_logger()

KV_WORTH = 0.25  # share of a verifier's slots that a long prefix is worth
HALF_WORTH_TOKENS = 128  # length of a prefix that is worth half of KV_WORTH
RECENTLY_LOST_COST = 0.5  # added to the cost of a verifier for RECENTLY_LOST_S after a loss
BLOCK = 32  # tokens; lengths of prefixes are multiples of it
MAX_KNOWN = 65536  # prefixes this gateway remembers
TTL_S = 1800.0  # of a hint that is not used
PUBLISHED_S = 10.0  # the least time between two publications of one hint, while other gateways still count it
RECENTLY_LOST_S = 10.0  # time after a loss in which other verifiers are preferred
POLL_TIMEOUT_S = 2.0
SILENT_S = 2.5  # from the first failed poll to another one, after which a verifier that sends nothing meanwhile loses its streams
MISSING_S = 20.0  # without an answer of a verifier, after which the log says so
NOT_READY_POLL_S = 0.1  # between polls while no verifier is ready


class Outcome(str, Enum):
    """Why a verifier was chosen; a label of the metric `route_decisions_total`."""

    AFFINITY = "affinity"  # it holds some of the prompt
    LEAST_LOAD = "least_load"
    FALLBACK = "fallback"  # it failed this request already, and there is no other


# Process of a verifier (`Upstream.holder`) → age in seconds of the hint that it holds a prefix.
Holders = Mapping[str, float]
IsHeld = Callable[[str, float], bool]  # (process, age) → whether the hint is true, as far as is known


def _lengths() -> Iterator[int]:
    length = step = BLOCK
    while True:
        yield length
        step *= 2 if length == 8 * step else 1
        length += step


def prefix_lengths(num_tokens: int) -> list[int]:
    """Lengths of the prefixes of a text that have keys, the shortest first: every block up to 8, then four in each doubling."""
    return list(takewhile(lambda length: length <= num_tokens, _lengths()))


class PrefixKeys:
    """Keys of the prefixes of a prompt, by `prefix_lengths`. Its tokens are hashed once, which takes milliseconds where it is long.

    about: what they depend on beside the tokens
    """

    def __init__(self, fingerprint: str, request: VerifierRequest):
        self.about, self.prompt = self.of(fingerprint, request), request.prompt
        first, num_blocks = first_key(fingerprint, self.about[1]), len(self.prompt) // BLOCK
        blocks = chain(first, self.prompt, BLOCK, num_blocks)
        self.keys = [blocks[length // BLOCK - 1].hex() for length in prefix_lengths(len(self.prompt))]
        self._last = blocks[-1] if blocks else first

    @staticmethod
    def of(fingerprint: str, request: VerifierRequest) -> tuple[str, str]:
        """`about` of the keys of a request."""
        return fingerprint, repr((request.tenant, request.cache_salt))

    def with_output(self, output: Sequence[int]) -> list[str]:
        """Keys of the prefixes of the prompt and this output behind it."""
        begin = len(self.prompt) // BLOCK * BLOCK  # of the tokens that are not hashed yet
        text = (*self.prompt[begin:], *output)
        blocks = chain(self._last, text, BLOCK, len(text) // BLOCK)
        lengths = prefix_lengths(begin + len(text))[len(self.keys) :]
        return [*self.keys, *(blocks[(length - begin) // BLOCK - 1].hex() for length in lengths)]


def tokens_held(holders: Sequence[Holders], is_held: IsHeld) -> dict[str, int]:
    """Tokens of a prompt that each verifier holds, from the hints on its prefixes, the shortest first."""
    held: dict[str, int] = {}
    for length, hints in zip(_lengths(), holders, strict=False):
        for process, age_s in hints.items():
            if is_held(process, age_s):
                held[process.rpartition("@")[0]] = length
    return held


@dataclass(slots=True)
class _Hint:
    """A process holds a prefix. Times are in seconds."""

    used_at: float
    published_at: float = -math.inf


class Prefixes:
    """Hints from the requests of this gateway. now: clock in seconds; is_held: (process, age of a hint in seconds) → whether it counts."""

    def __init__(self, now: Callable[[], float], is_held: IsHeld):
        self._now, self._is_held = now, is_held
        self._known: OrderedDict[str, dict[str, _Hint]] = OrderedDict()  # by key and process, least recently used first
        self._unpublished: dict[str, list[str]] = {}  # by process: keys that are not yet in the session store

    def sent(self, keys: Sequence[str], process: str) -> None:
        """A prompt with these prefixes was sent to a verifier, which will soon hold them. A hint is published at once if the one
        published last no longer counts: the verifier computes the evicted prefix again."""
        now = self._now()
        for key in keys:
            hints = self._known.setdefault(key, {})
            self._known.move_to_end(key)
            if process not in hints:
                for expired in [name for name, hint in hints.items() if now - hint.used_at > TTL_S]:
                    del hints[expired]
                hints[process] = _Hint(now)
            hint = hints[process]
            hint.used_at = now
            published_age_s = now - hint.published_at
            if published_age_s >= PUBLISHED_S or not self._is_held(process, published_age_s):
                hint.published_at = now
                self._unpublished.setdefault(process, []).append(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def holders(self, keys: Sequence[str]) -> list[Holders]:
        """The hints on each prefix."""
        now = self._now()
        return [{process: now - hint.used_at for process, hint in self._known.get(key, {}).items()} for key in keys]

    def take_unpublished(self) -> dict[str, list[str]]:
        """Return the keys to publish, by process, and forget that they were due."""
        taken, self._unpublished = self._unpublished, {}
        return taken


@dataclass(slots=True, eq=False)
class Stream:
    """A generation that runs at a verifier. `lose` ends it with Unavailable while it waits for the next tokens."""

    lose: Callable[[ServiceError], None]
    heard_at: float  # when it began, or last brought something, on the loop's clock


@dataclass(slots=True, eq=False)
class Upstream:
    """One verifier. `name` is its address."""

    name: str
    verifier: Verifier
    info: VerifierInfo | None = None
    answers: bool = False
    fits: bool = True  # its model is the one that this gateway serves
    listed: bool = True  # by discovery, and not as leaving
    num_in_flight: int = 0  # requests of this gateway, now
    streams: set[Stream] = field(default_factory=set)  # of these requests
    failing_since: float | None = None  # when, since its last answer, the first poll failed, on the loop's clock
    lost_at: float = -math.inf  # when one of its streams last broke, on the loop's clock
    reported_at: float = 0.0  # when `info` came, on the loop's clock
    reported_missing: bool = False  # the log says that it has never answered

    @property
    def ready(self) -> bool:
        return self.answers and self.fits and self.listed and self.info is not None and not self.info.draining

    @property
    def incarnation(self) -> int:
        """Incarnation of its process, as last reported; 0 = it has not answered yet."""
        return self.info.incarnation if self.info else 0

    @property
    def holder(self) -> str:
        """The name of its process in hints."""
        return f"{self.name}@{self.incarnation:x}"

    @property
    def load(self) -> float:
        """Requests per session slot. The count of this gateway is newer than the report of the verifier."""
        if self.info is None:
            return 0.0
        reported = self.info.num_running + self.info.num_waiting
        return max(reported, self.num_in_flight) / max(1, self.info.max_sessions)

    def cost(self, num_held: int, now: float) -> float:
        """Cost of a request of which it holds the first `num_held` tokens of the prompt."""
        recently_lost = now - self.lost_at < RECENTLY_LOST_S
        return self.load - KV_WORTH * num_held / (num_held + HALF_WORTH_TOKENS) + RECENTLY_LOST_COST * recently_lost


@dataclass(frozen=True, slots=True)
class Choice:
    upstream: Upstream
    outcome: Outcome


def choose(
    upstreams: Iterable[Upstream],
    key: str,
    *,
    held: Mapping[str, int] | None = None,
    avoid: Collection[str] = frozenset(),
    now: float,
) -> Choice | None:
    """The verifier for the request `key`, or None when none is ready.

    held: tokens of the prompt whose KV a verifier is thought to hold, by name. avoid: verifiers that failed this request already. A hash of
    `key` decides between equal costs, so that the turns of a session go to one verifier.
    """
    held = held or {}
    ready = [u for u in upstreams if u.ready]
    preferred = [u for u in ready if u.name not in avoid]
    best = min(preferred or ready, key=lambda u: (u.cost(held.get(u.name, 0), now), _score(key, u.name)), default=None)
    if best is None:
        return None
    if not preferred:
        return Choice(best, Outcome.FALLBACK)
    return Choice(best, Outcome.AFFINITY if held.get(best.name) else Outcome.LEAST_LOAD)


def _score(key: str, name: str) -> bytes:
    """Rendezvous hashing: adding or removing a verifier moves only the keys that must move."""
    return hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()


class Upstreams:
    """All verifiers of a model. The first one that answers determines the model; others must have the same.

    Verifiers of `sources` come and go; `dial` connects to an address. A verifier that is not listed any more completes the requests that it
    runs.
    """

    def __init__(
        self,
        verifiers: Mapping[str, Verifier],
        *,
        sources: Sequence[tuple[str, Discovery]] = (),
        dial: Callable[[str], RemoteVerifier] = RemoteVerifier,
        tokenizer_hash: str = "",
        poll_s: float = 1.0,
    ):
        self._upstreams = {name: Upstream(name, verifier) for name, verifier in verifiers.items()}
        self._sources, self._dial = sources, dial
        self._discovered: Mapping[str, tuple[str, Peer]] = {}  # by address, as listed now
        self._dialled: dict[str, RemoteVerifier] = {}
        self._tokenizer_hash = tokenizer_hash  # of the gateway's own tokenizer; "" = not compared
        self._poll_s = poll_s
        self._poll_now = asyncio.Event()
        self._polled = asyncio.Event()  # set, and replaced, after every answer
        self.model: ModelInfo | None = None
        self.mismatch = ""  # why a verifier does not fit, for messages

    def __iter__(self) -> Iterator[Upstream]:
        return iter(list(self._upstreams.values()))

    @property
    def ready(self) -> bool:
        return any(u.ready for u in self)

    def is_held(self, process: str, age_s: float) -> bool:
        """Whether this process still runs, and text that was in use `age_s` seconds ago is still in its cache."""
        upstream = self._upstreams.get(process.rpartition("@")[0])
        if upstream is None or upstream.info is None or process != upstream.holder:
            return False
        reported_s_ago = asyncio.get_running_loop().time() - upstream.reported_at
        return age_s <= min(upstream.info.stats.get("kv_evicted_age_s", math.inf) + reported_s_ago, TTL_S)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until one is ready; False when none is in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready:
                    await self._polled.wait()
        except TimeoutError:
            return False
        return True

    def lost(self, upstream: Upstream) -> None:
        """A stream of this verifier broke: not ready until it answers again."""
        upstream.answers, upstream.lost_at = False, asyncio.get_running_loop().time()
        if not self.ready:
            self._poll_now.set()

    async def has_died(self, upstream: Upstream, incarnation: int) -> bool:
        """Poll it now: whether the process of this incarnation has gone, so that nothing or another process answers."""
        await self._ask(upstream)
        return not upstream.answers or upstream.incarnation != incarnation

    async def run(self) -> None:
        """Follow the sources and poll every verifier, until cancelled; then close the connections that it has made."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(follow(self._sources, self._reconcile))
                await self._poll_forever()
        finally:
            for verifier in self._dialled.values():
                await verifier.close()

    def _reconcile(self, discovered: Mapping[str, tuple[str, Peer]]) -> None:
        """Connect to new verifiers, and send no more requests to those that leave or are no longer listed."""
        self._discovered = discovered
        for address in discovered.keys() - self._upstreams.keys():
            self._dialled[address] = self._dial(address)
            self._upstreams[address] = Upstream(address, self._dialled[address])
        for address in self._dialled:
            self._upstreams[address].listed = address in discovered and not discovered[address][1].leaving
        self._poll_now.set()

    async def _drop_gone(self) -> None:
        for address in list(self._dialled):  # closing one takes time, in which another may come back
            if address not in self._discovered and not self._upstreams[address].num_in_flight:
                del self._upstreams[address]
                await self._dialled.pop(address).close()

    async def _poll_forever(self) -> None:
        """Poll once a second, and more often while none is ready. A verifier that does not answer delays the other polls only once."""
        asking: dict[Upstream, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await self._drop_gone()
                asking = {upstream: task for upstream, task in asking.items() if not task.done()}
                asking |= {
                    upstream: group.create_task(self._ask(upstream)) for upstream in self if upstream not in asking
                }
                if answering := [task for upstream, task in asking.items() if upstream.failing_since is None]:
                    await asyncio.wait(answering)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s if self.ready else min(self._poll_s, NOT_READY_POLL_S)):
                        await self._poll_now.wait()
                self._poll_now.clear()

    async def _ask(self, upstream: Upstream) -> None:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                info = await upstream.verifier.get_info()
        except (RootwardError, OSError, TimeoutError) as error:
            if upstream.answers:
                log.warning("verifier_lost", verifier=upstream.name, error=type(error).__name__)
            upstream.answers = False
            self._take_streams(upstream)
            self._report_missing(upstream, error)
            return
        upstream.failing_since = None
        if not upstream.answers:
            log.info("verifier_found", verifier=upstream.name, worker=info.worker, model=info.model.name)
        upstream.reported_at = asyncio.get_running_loop().time()
        problem = self._difference(info.model)
        upstream.info, upstream.answers, upstream.fits = info, True, not problem
        if not problem:
            self.model = self.model or info.model
        elif problem != self.mismatch:
            log.error("verifier_does_not_fit", verifier=upstream.name, problem=problem)
            self.mismatch = problem
        self._polled.set()
        self._polled = asyncio.Event()

    def _report_missing(self, upstream: Upstream, error: Exception) -> None:
        """Log, once, that a verifier has never answered: its address may be wrong."""
        since = upstream.failing_since
        if upstream.info is not None or upstream.reported_missing or since is None:
            return
        if asyncio.get_running_loop().time() - since >= MISSING_S:
            upstream.reported_missing = True
            log.warning("verifier_missing", verifier=upstream.name, seconds=MISSING_S, error=first_line(error))

    def _take_streams(self, upstream: Upstream) -> None:
        """A poll failed: take the streams from a verifier that hangs. More than one poll must have failed, since this gateway may itself
        have stood still during one, and another verifier must be ready, since this one may go on."""
        now = asyncio.get_running_loop().time()
        if upstream.failing_since is None:
            upstream.failing_since = now
        silent_s = now - upstream.failing_since
        if silent_s < SILENT_S or not self.ready:
            return
        for stream in list(upstream.streams):
            if now - stream.heard_at >= SILENT_S:
                stream.lose(Unavailable(f"the verifier has not answered for {silent_s:.1f} s"))

    def _difference(self, model: ModelInfo) -> str:
        """Why tokens of this model cannot continue those of the served one; "" if they can."""
        for name in ("vocab_size", "tokenizer_hash", "fingerprint", "eos_ids"):
            ours, theirs = getattr(self.model or model, name), getattr(model, name)
            if ours != theirs:
                return f"{name} {theirs!r} is not {ours!r} of the first verifier"
        own = self._tokenizer_hash
        if own and model.tokenizer_hash and own != model.tokenizer_hash:
            return f"tokenizer {model.tokenizer_hash} of the verifier is not the gateway's {own}"
        return ""
