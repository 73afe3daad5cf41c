"""A drafter that is not trusted cannot choose, by what it sends or keeps back, between two tokens that it knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from statistical.test_law_through_the_wire import VOCAB
from support.services import collect, request, tabular_pair, until, verifier_of

from benchmarks.results import p_value
from rootward.core.frames import FromDrafter, Grow, HelloAck, Open, Reject, ToDrafter, prefix_hash
from rootward.core.requests import DraftMode, Rule
from rootward.core.rng import NO_TOKEN, Key, Role, bonus_gumbel, philox_one
from rootward.engine.tabular import TabularModel
from rootward.ports import DEFAULT_POOL
from verifier_service.service import VerifierService
from verifier_service.session import Draft, Session, number_of

WISHED = 0  # token that the drafter wants in the text
LOOK_AHEAD = 4  # tokens
AWAY_MS = 100


@dataclass
class Selective:
    """A drafter that knows the target, and the noise of bonus tokens if it is told. It sends one chosen node, or none where it knows that
    plain decoding would give WISHED.

    leaves: it always sends its node, but refuses a session for good once it knows that plain decoding would give WISHED often. It
    remembers what it was told of a session
    away: at first it refuses each session for a moment
    guesses: it knows the seeds of the requests
    """

    target: TabularModel
    leaves: bool = False
    away: bool = False
    guesses: bool = False
    on_open: Callable[[], None] = lambda: None
    opens: list[Open] = field(default_factory=list)
    left: list[tuple[str, int]] = field(default_factory=list)  # request and length of its text

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        told: dict[int, Open] = {}
        texts: dict[int, list[int]] = {}
        num_sent: dict[int, int] = {}
        async for frame in inbound:
            if frame.hello is not None:
                yield FromDrafter(HelloAck("d", 7, frame.hello.tokenizer_hash, VOCAB, 4096, tuple(DraftMode), 256, 64))
            known = {message.session: message.bonus_key for message in self.opens if message.bonus_key is not None}
            new = [message.slot for message in frame.opens if message.session not in known]
            for message in frame.opens:
                self.opens.append(message)
                self.on_open()
                key = known.get(message.session, self._guessed(message) if self.guesses else message.bonus_key)
                told[message.slot], texts[message.slot] = replace(message, bonus_key=key), list(message.prefix)
                num_sent[message.slot] = 0
            for commit in frame.commits:
                texts[commit.slot] += commit.tokens
            slots = [message.slot for message in (*frame.opens, *frame.commits)]
            if self.away and new:
                yield FromDrafter(rejects=tuple(Reject(slot, "full", AWAY_MS) for slot in new))
                slots = [slot for slot in slots if slot not in new]
            if self.leaves and (left := [s for s in slots if self._likes_to_leave(told[s], texts[s])]):
                self.left += [(told[slot].session, len(texts[slot])) for slot in left]
                yield FromDrafter(rejects=tuple(Reject(slot, "too long") for slot in left))
                slots = [slot for slot in slots if slot not in left]
            grows = []
            for slot in slots:
                size = 0 if self._plain_token(told[slot], texts[slot]) == WISHED else 1
                grows.append(self._growth(slot, texts[slot], 1 + num_sent[slot], size))
                num_sent[slot] += size
            yield FromDrafter(grows=tuple(grows))

    @staticmethod
    def _guessed(message: Open) -> int:
        seed = int(message.session.removeprefix("r"))
        return Key(seed ^ number_of(f"{message.epoch} {message.session}"), message.choice).bonus()

    def _plain_token(self, told: Open, text: list[int]) -> int | None:
        """What a round without a tree would give, as far as the drafter knows."""
        if told.bonus_key is None or self.leaves:
            return None
        noise = bonus_gumbel(told.bonus_key, told.epoch, len(text), VOCAB)
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(self.target.law(text[-3:])) + noise))

    def _likes_to_leave(self, told: Open, text: list[int]) -> bool:
        """Whether WISHED is frequent in the LOOK_AHEAD tokens of plain decoding after the next one, which it may not know."""
        if told.bonus_key is None:
            return False
        num_wished = 0
        for first in range(VOCAB):
            found = [*text, first]
            for _ in range(LOOK_AHEAD):
                low, high, *_ = philox_one(NO_TOKEN, len(found), told.epoch, Role.BONUS.value, told.bonus_key)
                coin = ((low | high << 32) >> 11) * 2.0**-53
                found.append(int(np.searchsorted(self.target.law(found[-3:]).cumsum(), coin, "right")))
            num_wished += found[-LOOK_AHEAD:].count(WISHED)
        return num_wished >= 2 * VOCAB

    @staticmethod
    def _growth(slot: int, text: list[int], first: int, size: int) -> Grow:
        parent, token = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        return Grow(slot, len(text), prefix_hash(text), first, parent, token, np.zeros(size, dtype=bool), at_rest=True)


async def texts_of(
    service: VerifierService, *, num_requests: int, length: int, begun: list[list[int]] | None = None
) -> list[list[int]]:
    """begun: texts of a first attempt, which is resumed."""
    await until(lambda: service.pool.up)
    wanted = [
        request(f"r{i}", max_tokens=length, seed=i, rule=Rule.TRAVERSAL, law=DraftMode.SAMPLED)
        for i in range(num_requests)
    ]
    if begun is not None:
        wanted = [replace(one, committed=tuple(text[3:]), epoch=2) for one, text in zip(wanted, begun, strict=True)]
    found = await asyncio.gather(*(collect(service, one) for one in wanted))
    return [[1, 2, 3, *tokens] for tokens, _ in found]


@pytest.mark.parametrize("caught_late", [False, True])
async def test_a_drafter_that_is_not_trusted_cannot_choose_between_two_known_tokens(caught_late: bool) -> None:
    """It would withhold its tree where the noise that it knows makes plain decoding give what it wants."""
    target, _ = tabular_pair(vocab=VOCAB, slots=16)
    drafter = Selective(target)
    untrusted = [] if caught_late else [DEFAULT_POOL]
    policy = {"num_draft_tokens": 6, "num_ahead_tokens": 16, "untrusted_pools": untrusted}
    async with verifier_of(target, {"d": drafter}, **policy) as service:
        if caught_late:  # after it was told the noise

            def caught() -> None:
                service.audit._known("d").caught = "argmax"

            drafter.on_open = caught
        texts = await texts_of(service, num_requests=16, length=300)
    assert drafter.opens
    assert caught_late or not any(message.bonus_key for message in drafter.opens)
    assert p_value(target, texts, least_freedom=60) > 1e-4


async def test_a_caught_drafter_cannot_choose_when_to_leave() -> None:
    """Plain decoding after it would give tokens that it knows beforehand."""
    target, _ = tabular_pair(vocab=VOCAB, slots=256)  # all sessions begin before the drafter is caught
    drafter = Selective(target, leaves=True)
    async with verifier_of(target, {"d": drafter}, num_draft_tokens=6, num_ahead_tokens=16) as service:
        drafter.on_open = lambda: setattr(service.audit._known("d"), "caught", "argmax")
        texts = await texts_of(service, num_requests=250, length=24)
    assert_not_chosen(target, drafter, texts)


async def test_a_drafter_that_was_caught_while_it_was_away_cannot_choose_when_to_leave() -> None:
    """It knows the noise from before."""
    target, _ = tabular_pair(vocab=VOCAB, slots=256, step_ms=10.0)
    drafter = Selective(target, leaves=True, away=True)
    async with verifier_of(target, {"d": drafter}, num_draft_tokens=6, num_ahead_tokens=16) as service:
        own = service.pool._open

        def caught_before(session: Session, name: str) -> Draft:
            if session.request.request_id in {message.session for message in drafter.opens}:
                service.audit._known("d").caught = "argmax"
            return own(session, name)

        service.pool._open = caught_before  # type: ignore[method-assign]
        texts = await texts_of(service, num_requests=250, length=60)
    assert_not_chosen(target, drafter, texts)


async def test_a_drafter_that_was_caught_before_a_request_is_resumed_cannot_choose_when_to_leave() -> None:
    """It was told the noise of the attempt before."""
    target, _ = tabular_pair(vocab=VOCAB, slots=256)
    drafter = Selective(target, leaves=True, away=True)
    async with verifier_of(target, {"d": drafter}, num_draft_tokens=6, num_ahead_tokens=16) as service:
        begun = await texts_of(service, num_requests=250, length=1)
        service.audit._known("d").caught = "argmax"
        texts = await texts_of(service, num_requests=250, length=24, begun=begun)
    assert_not_chosen(target, drafter, texts)


async def test_a_drafter_that_is_not_trusted_cannot_choose_when_to_leave_by_the_seed() -> None:
    """Clients choose seeds that are easily guessed."""
    target, _ = tabular_pair(vocab=VOCAB, slots=256)
    drafter = Selective(target, leaves=True, guesses=True)
    policy = {"num_draft_tokens": 6, "untrusted_pools": [DEFAULT_POOL]}
    async with verifier_of(target, {"d": drafter}, **policy) as service:
        texts = await texts_of(service, num_requests=250, length=24)
    assert_not_chosen(target, drafter, texts)


def assert_not_chosen(target: TabularModel, drafter: Selective, texts: list[list[int]]) -> None:
    """WISHED is as frequent after the drafter has left as the target's distribution says."""
    excess, variance = 0.0, 0.0  # of WISHED after it has left, against the target's distribution given the text before
    for name, length in drafter.left:
        text = texts[int(name.removeprefix("r"))]
        for i in range(length + 1, min(length + 1 + LOOK_AHEAD, len(text))):
            share = target.law(text[i - 3 : i])[WISHED]
            excess += (text[i] == WISHED) - share
            variance += share * (1.0 - share)
    assert len(drafter.left) > 200
    assert abs(excess) < 4.0 * variance**0.5
