"""Routing: the verifiers that a gateway knows, what they hold, and which one a request goes to.

    cost of a verifier = load  −  value of the part of the prompt whose KV it holds

Load is requests per session slot. KV that is already computed saves prefill, the more the longer it is, but it is never worth more than
`KV_WORTH` of a verifier's slots: a warm cache does not draw all requests to one verifier.

Which verifier holds which prompt is known by hashes of prompt blocks, which gateways share through the session store. A block is `BLOCK`
tokens and everything before them, so one key stands for a whole prefix; the key also depends on the model and on the tenant, who shares
cached prefixes with nobody. These are hints: the verifier's own cache decides.

Verifiers are listed or discovered, and asked for their state once a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from enum import Enum

import structlog

from rootward.engine.prefix_keys import chain, first_key
from rootward.errors import RootwardError
from rootward.ports import Discovery, ModelInfo, Peer, Verifier, VerifierInfo
from rootward.wire.clients import RemoteVerifier

log = structlog.get_logger()

KV_WORTH = 0.25  # share of a verifier's slots that a long prefix is worth
HALF_WORTH_TOKENS = 128  # so many tokens are worth half of it
RECENTLY_LOST_COST = 0.5  # of a verifier that was lost a moment ago
BLOCK = 32  # tokens
MAX_BLOCKS = 64  # of one prompt that are looked at
MAX_KNOWN = 65536  # blocks this gateway remembers
TTL_S = 300.0
RECENTLY_LOST_S = 10.0  # after a loss, others are preferred
HURRY_S = 0.1  # between questions while a request waits for a verifier


@dataclass(frozen=True, slots=True)
class VerifierView:
    """One verifier as this gateway sees it."""

    name: str
    ready: bool  # it answered lately, fits the model and is not draining
    num_running: int = 0  # of all gateways, as it last said
    num_waiting: int = 0
    max_sessions: int = 1
    num_in_flight: int = 0  # of this gateway, now
    recently_lost: bool = False  # it was lost a moment ago, and may be again

    @property
    def load(self) -> float:
        """Requests per session slot. What this gateway sent is newer than what the verifier last said."""
        return max(self.num_running + self.num_waiting, self.num_in_flight) / max(1, self.max_sessions)


class Outcome(str, Enum):
    """Why a verifier was chosen; a label of the metric `route_decisions_total`."""

    AFFINITY = "affinity"  # it holds some of the prompt
    LEAST_LOAD = "least_load"
    FALLBACK = "fallback"  # one that was to be avoided, because there is no other


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    outcome: Outcome


def choose(
    views: Sequence[VerifierView],
    key: str,
    *,
    held: Mapping[str, int] | None = None,
    avoid: Collection[str] = frozenset(),
) -> Choice | None:
    """A verifier for the request `key`, or None when none is ready.

    `held`: tokens of the prompt whose KV a verifier is thought to hold, by name. Those in `avoid` failed this request already. Equal costs
    are told apart by a hash of `key`, so that turns of a session go the same way.
    """
    held = held or {}
    ready = [v for v in views if v.ready]
    wanted = [v for v in ready if v.name not in avoid]
    best = min(wanted or ready, key=lambda v: (cost(v, held.get(v.name, 0)), _score(key, v.name)), default=None)
    if best is None:
        return None
    if not wanted:
        return Choice(best.name, Outcome.FALLBACK)
    return Choice(best.name, Outcome.AFFINITY if held.get(best.name) else Outcome.LEAST_LOAD)


def cost(view: VerifierView, num_held: int) -> float:
    return view.load - KV_WORTH * num_held / (num_held + HALF_WORTH_TOKENS) + RECENTLY_LOST_COST * view.recently_lost


def _score(key: str, name: str) -> bytes:
    """Rendezvous hashing: adding or removing a verifier moves only the keys that must move."""
    return hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()


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
    """Who holds which blocks, as far as this gateway knows itself. `now` is in seconds. `unpublished`: not yet in the session store."""

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
        """It has restarted, and holds nothing."""
        for holders in self._known.values():
            holders.pop(verifier, None)
        self.unpublished.pop(verifier, None)

    def take_unpublished(self) -> dict[str, list[str]]:
        taken, self.unpublished = self.unpublished, {}
        return taken


@dataclass(slots=True, eq=False)
class Upstream:
    """One verifier. `name` is its address."""

    name: str
    verifier: Verifier
    info: VerifierInfo | None = None
    answers: bool = False
    fits: bool = True  # its model is the one this gateway serves
    listed: bool = True  # discovery knows it, and not as one that leaves
    num_in_flight: int = 0
    lost_at: float = -math.inf  # when a stream of it last broke, on the loop's clock

    @property
    def ready(self) -> bool:
        return self.answers and self.fits and self.listed and self.info is not None and not self.info.draining

    @property
    def incarnation(self) -> int:
        """Of its process, as it last said; 0 = it has not answered yet."""
        return self.info.incarnation if self.info else 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def view(self, now: float) -> VerifierView:
        info = self.info
        if info is None:
            return VerifierView(self.name, ready=False)
        load = info.num_running, info.num_waiting, info.max_sessions, self.num_in_flight
        return VerifierView(self.name, self.ready, *load, recently_lost=now - self.lost_at < RECENTLY_LOST_S)


class Upstreams:
    """All verifiers. The first one that answers says which model is served; others must have the same.

    Those of `sources` come and go; `dial` makes one of an address. One that has gone ends what it runs.
    """

    def __init__(
        self,
        verifiers: Mapping[str, Verifier],
        *,
        sources: Sequence[Discovery] = (),
        dial: Callable[[str], RemoteVerifier] = RemoteVerifier,
        tokenizer_hash: str = "",
        poll_s: float = 1.0,
        timeout_s: float = 2.0,
    ):
        self._upstreams = {name: Upstream(name, verifier) for name, verifier in verifiers.items()}
        self._sources, self._dial = sources, dial
        self._found: dict[int, tuple[Peer, ...]] = {}  # by source, as it last said
        self._dialled: dict[str, RemoteVerifier] = {}
        self._tokenizer_hash = tokenizer_hash  # of the gateway's own tokenizer; "" = not compared
        self._poll_s, self._timeout_s = poll_s, timeout_s
        self._num_waiting = 0
        self._hurry = asyncio.Event()
        self._polled = asyncio.Event()  # set, and replaced, after every round of questions
        self.model: ModelInfo | None = None
        self.on_restart: Callable[[str], None] = lambda name: (
            None
        )  # called with the name of a verifier that has restarted
        self.mismatch = ""  # why a verifier does not fit, for people

    def __iter__(self) -> Iterator[Upstream]:
        return iter(list(self._upstreams.values()))

    @property
    def ready(self) -> bool:
        return any(u.ready for u in self)

    def get(self, name: str) -> Upstream:
        return self._upstreams[name]

    def choose(
        self, key: str, *, held: Mapping[str, int] | None = None, avoid: Collection[str] = frozenset()
    ) -> Choice | None:
        now = asyncio.get_running_loop().time()
        return choose([u.view(now) for u in self], key, held=held, avoid=avoid)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Have `run` ask at once and often until one is ready; False when none is in time."""
        self._num_waiting += 1
        self._hurry.set()
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready:
                    await self._polled.wait()
        except TimeoutError:
            return False
        finally:
            self._num_waiting -= 1
        return True

    def lost(self, name: str) -> None:
        """A stream of this verifier broke: not ready until it answers again."""
        if (lost := self._upstreams.get(name)) is not None:
            lost.answers, lost.lost_at = False, asyncio.get_running_loop().time()

    async def has_died(self, upstream: Upstream, incarnation: int) -> bool:
        """Whether the process that was `incarnation` has gone: nothing answers there, or another process does. Asks it now."""
        await self._ask(upstream)
        return not upstream.answers or upstream.incarnation != incarnation

    async def run(self) -> None:
        """Follow the sources and ask every verifier, until cancelled; then those that were dialled are closed."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, source in enumerate(self._sources):
                    group.create_task(self._follow(number, source))
                await self._ask_forever()
        finally:
            for verifier in self._dialled.values():
                await verifier.close()

    async def _follow(self, number: int, source: Discovery) -> None:
        async with aclosing(source.watch()) as changes:
            async for peers in changes:
                self._found[number] = peers
                self._note_found()

    def _note_found(self) -> None:
        """Dial the new, and give nothing more to those that leave or have gone."""
        peers = {peer.address: peer for found in self._found.values() for peer in found}
        for address in peers.keys() - self._upstreams.keys():
            self._dialled[address] = self._dial(address)
            self._upstreams[address] = Upstream(address, self._dialled[address])
            self._hurry.set()
        for address in self._dialled:
            self._upstreams[address].listed = address in peers and not peers[address].leaving

    async def _drop_gone(self) -> None:
        known = {peer.address for found in self._found.values() for peer in found}
        for address in [a for a in self._dialled if a not in known and not self._upstreams[a].num_in_flight]:
            del self._upstreams[address]
            await self._dialled.pop(address).close()

    async def _ask_forever(self) -> None:
        """Once a second, more often while a request waits for an answer."""
        while True:
            await self._drop_gone()
            await self.poll()
            self._polled.set()
            self._polled = asyncio.Event()
            self._hurry.clear()
            try:
                async with asyncio.timeout(HURRY_S if self._num_waiting else self._poll_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass

    async def poll(self) -> None:
        """Ask every verifier once."""
        async with asyncio.TaskGroup() as group:
            for upstream in self:
                group.create_task(self._ask(upstream))

    async def _ask(self, upstream: Upstream) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                info = await upstream.verifier.get_info()
        except (RootwardError, OSError, TimeoutError) as error:
            if upstream.answers:
                log.warning("verifier_lost", verifier=upstream.name, error=type(error).__name__)
            upstream.answers = False
            return
        if not upstream.answers:
            log.info("verifier_found", verifier=upstream.name, worker=info.worker, model=info.model.name)
        if upstream.info and upstream.info.incarnation != info.incarnation:
            self.on_restart(upstream.name)
        upstream.info, upstream.answers, upstream.fits = info, True, self._fits(upstream.name, info.model)

    def _fits(self, name: str, model: ModelInfo) -> bool:
        reference = self.model or model
        problem = _difference(reference, model) or self._tokenizer_difference(model)
        if problem:
            if problem != self.mismatch:
                log.error("verifier_does_not_fit", verifier=name, problem=problem)
            self.mismatch = problem
            return False
        self.model = reference
        return True

    def _tokenizer_difference(self, model: ModelInfo) -> str:
        if not self._tokenizer_hash or not model.tokenizer_hash or self._tokenizer_hash == model.tokenizer_hash:
            return ""
        return f"tokenizer {model.tokenizer_hash} of the verifier is not the gateway's {self._tokenizer_hash}"


def _difference(a: ModelInfo, b: ModelInfo) -> str:
    """The first thing in which the models of two verifiers differ; "" when tokens of one continue those of the other."""
    for field in ("vocab_size", "tokenizer_hash", "fingerprint", "eos_ids"):
        ours, theirs = getattr(a, field), getattr(b, field)
        if ours != theirs:
            return f"{field} {theirs!r} is not {ours!r} of the first verifier"
    return ""
