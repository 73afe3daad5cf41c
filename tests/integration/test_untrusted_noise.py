"""What a drafter knows of the random numbers of a verifier, it cannot use to choose the text by the nodes that it sends or keeps back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
from statistical.test_law_through_the_wire import VOCAB
from support.services import collect, request, tabular_pair, until, verifier_of

from benchmarks.results import p_value
from rootward.core.frames import FromDrafter, Grow, HelloAck, Launch, Open, Reject, ToDrafter, prefix_hash
from rootward.core.requests import DraftMode, DraftStrategy, Rule, Speculation, SpeculationMode
from rootward.core.rng import NO_TOKEN, Key, Role, bonus_gumbel, philox_one
from rootward.engine.tabular import TabularModel
from rootward.ports import DEFAULT_POOL
from verifier_service.service import VerifierService
from verifier_service.session import number_of

WISHED = 0  # token that the drafter wants in the text
LOOK_AHEAD = 4  # tokens


class Knows(Enum):
    """The keys of the noise that a dishonest drafter computes with."""

    TOLD = "told"  # of a launched round, which it takes for the key of the rounds after it
    SEED = "seed"  # of the request, which a client has told it or which is easily guessed; and the name of the request


@dataclass
class Selective:
    """A drafter that knows the target, and wants a token in the text. It sends one chosen node, or none where it thinks that plain decoding
    would give WISHED.

    leaves: it always sends its node, but refuses a session for good once it thinks that plain decoding would give WISHED often
    """

    target: TabularModel
    knows: Knows
    leaves: bool = False
    launches: list[Launch] = field(default_factory=list)
    withheld: int = 0
    left: list[tuple[int, int]] = field(default_factory=list)  # number of the request and length of its text

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        opens: dict[int, Open] = {}
        texts: dict[int, list[int]] = {}
        keys: dict[int, int] = {}  # of the bonus noise, by number of the request
        num_sent: dict[int, int] = {}
        async for frame in inbound:
            if frame.hello is not None:
                yield FromDrafter(HelloAck("d", 7, frame.hello.tokenizer_hash, VOCAB, 4096, tuple(DraftMode), 256, 64))
            for message in frame.opens:
                opens[message.slot], texts[message.slot], num_sent[message.slot] = message, list(message.prefix), 0
            for commit in frame.commits:
                texts[commit.slot] += commit.tokens
            for launch in frame.launches:
                self.launches.append(launch)
                if launch.slot in opens:
                    keys[opens[launch.slot].choice] = launch.bonus_key
            slots = [message.slot for message in (*frame.opens, *frame.commits)]
            if self.leaves and (left := [s for s in slots if self._likes_to_leave(opens[s], texts[s])]):
                self.left += [(opens[slot].choice, len(texts[slot])) for slot in left]
                yield FromDrafter(rejects=tuple(Reject(slot, "too long") for slot in left))
                slots = [slot for slot in slots if slot not in left]
            grows = []
            for slot in slots:
                size = 0 if self._plain_token(opens[slot], texts[slot], keys) == WISHED else 1
                self.withheld += not size
                grows.append(self._growth(slot, texts[slot], 1 + num_sent[slot], size))
                num_sent[slot] += size
            if grows:
                yield FromDrafter(grows=tuple(grows))

    @staticmethod
    def _guessed(message: Open) -> Key:
        number = message.choice  # see `texts_of`
        return Key(number ^ number_of(f"{message.epoch} r{number}"), number)

    def _plain_token(self, opened: Open, text: list[int], keys: dict[str, int]) -> int | None:
        """What a round without a tree would give, as far as the drafter knows."""
        told = self._guessed(opened).bonus(len(text)) if self.knows is Knows.SEED else keys.get(opened.choice)
        if told is None or self.leaves:
            return None
        noise = bonus_gumbel(told, opened.epoch, len(text), VOCAB)
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(self.target.law(text[-3:])) + noise))

    def _likes_to_leave(self, opened: Open, text: list[int]) -> bool:
        """Whether WISHED is frequent in the LOOK_AHEAD tokens of plain decoding after the next one, which it may not know."""
        key, num_wished = self._guessed(opened).derive(Role.BONUS), 0
        for first in range(VOCAB):
            found = [*text, first]
            for _ in range(LOOK_AHEAD):
                low, high, *_ = philox_one(NO_TOKEN, len(found), opened.epoch, Role.BONUS.value, key)
                coin = ((low | high << 32) >> 11) * 2.0**-53
                found.append(int(np.searchsorted(self.target.law(found[-3:]).cumsum(), coin, "right")))
            num_wished += found[-LOOK_AHEAD:].count(WISHED)
        return num_wished >= 2 * VOCAB

    @staticmethod
    def _growth(slot: int, text: list[int], first: int, size: int) -> Grow:
        parent, token = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        return Grow(slot, len(text), prefix_hash(text), first, parent, token, np.zeros(size, dtype=bool), at_rest=True)


async def texts_of(service: VerifierService, *, num_requests: int, length: int) -> list[list[int]]:
    """Of requests whose number is their seed, and their choice, by which a drafter tells them apart."""
    await until(lambda: service.pool.up)
    wanted = [
        request(f"r{i}", max_tokens=length, seed=i, choice=i, rule=Rule.TRAVERSAL, law=DraftMode.SAMPLED)
        for i in range(num_requests)
    ]
    found = await asyncio.gather(*(collect(service, one) for one in wanted))
    return [[1, 2, 3, *tokens] for tokens, _ in found]


async def p_value_of_texts(drafter: Selective, target: TabularModel) -> float:
    """Of texts whose drafter withholds its trees by what it knows."""
    async with verifier_of(target, {"d": drafter}, num_draft_tokens=6, num_ahead_tokens=16) as service:
        texts = await texts_of(service, num_requests=16, length=300)
    assert drafter.withheld > 400
    return p_value(target, texts, least_freedom=60)


@pytest.mark.parametrize("knows", Knows)
async def test_a_drafter_cannot_choose_between_two_tokens_by_the_noise(knows: Knows) -> None:
    """It is trusted, and would withhold its tree where plain decoding gives what it wants. Each round has noise of its own, which is told
    once nothing can be added to its tree."""
    target, _ = tabular_pair(vocab=VOCAB, slots=16)
    drafter = Selective(target, knows)
    assert await p_value_of_texts(drafter, target) > 1e-4
    assert len(drafter.launches) > 1000


async def test_rounds_that_share_their_noise_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a drafter that was told the noise of a round knows that of the next one before it sends its tree."""
    own = Key.bonus
    monkeypatch.setattr(Key, "bonus", lambda key, length: own(key, 0))
    target, _ = tabular_pair(vocab=VOCAB, slots=16)
    assert await p_value_of_texts(Selective(target, Knows.TOLD), target) < 1e-6


async def test_a_drafter_that_is_not_trusted_cannot_choose_either() -> None:
    target, _ = tabular_pair(vocab=VOCAB, slots=16)
    drafter = Selective(target, Knows.TOLD)
    policy = {"num_draft_tokens": 6, "num_ahead_tokens": 16, "untrusted_pools": [DEFAULT_POOL]}
    async with verifier_of(target, {"d": drafter}, **policy) as service:
        texts = await texts_of(service, num_requests=16, length=300)
    assert p_value(target, texts, least_freedom=60) > 1e-4


async def test_a_drafter_cannot_choose_when_to_leave_by_the_seed() -> None:
    """Clients choose seeds that are easily guessed."""
    target, _ = tabular_pair(vocab=VOCAB, slots=256)
    drafter = Selective(target, Knows.SEED, leaves=True)
    async with verifier_of(target, {"d": drafter}, num_draft_tokens=6) as service:
        texts = await texts_of(service, num_requests=250, length=24)
    assert_not_chosen(target, drafter, texts)


def assert_not_chosen(target: TabularModel, drafter: Selective, texts: list[list[int]]) -> None:
    """WISHED is as frequent after the drafter has left as the target's distribution says."""
    excess, variance = 0.0, 0.0  # of WISHED after it has left, against the target's distribution given the text before
    for number, length in drafter.left:
        text = texts[number]
        for i in range(length + 1, min(length + 1 + LOOK_AHEAD, len(text))):
            share = target.law(text[i - 3 : i])[WISHED]
            excess += (text[i] == WISHED) - share
            variance += share * (1.0 - share)
    assert len(drafter.left) > 200
    assert abs(excess) < 4.0 * variance**0.5


@dataclass
class Predicting:
    """A drafter that predicts a bonus token in every tree, also in trees that start anew with every commit."""

    num_sent: int = 0

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        texts: dict[int, list[int]] = {}
        first: dict[int, int] = {}
        async for frame in inbound:
            if frame.hello is not None:
                yield FromDrafter(HelloAck("d", 7, frame.hello.tokenizer_hash, VOCAB, 4096, tuple(DraftMode), 256, 64))
            for message in frame.opens:
                texts[message.slot], first[message.slot] = list(message.prefix), 1
            for commit in frame.commits:
                texts[commit.slot] += commit.tokens
            grows = [self._growth(m.slot, texts[m.slot], first) for m in (*frame.opens, *frame.commits)]
            if grows:
                yield FromDrafter(grows=tuple(grows))

    def _growth(self, slot: int, text: list[int], first: dict[int, int]) -> Grow:
        none, yes = np.zeros(1, dtype=np.int64), np.ones(1, dtype=bool)
        self.num_sent += 1
        first[slot] += 1
        return Grow(slot, len(text), prefix_hash(text), first[slot] - 1, none, none, ~yes, at_rest=True, guess=yes)


@pytest.mark.parametrize("strategy", ["best_first", "rsd_c:2,1", "rsd_s:2,2", "chain:3", "greedy:2,2", "iid:2,2"])
async def test_no_frame_of_a_drafter_loses_a_round(strategy: str) -> None:
    """It knows the noise of the round that runs. A round that were lost would be drawn again with other noise, so the drafter could reject
    what it does not wish. Nor may other sessions of the step be lost."""
    target, _ = tabular_pair(vocab=VOCAB, slots=16)
    drafter = Predicting()
    async with verifier_of(target, {"d": drafter}, num_draft_tokens=6, num_ahead_tokens=16) as service:
        await until(lambda: service.pool.up)
        wish = Speculation(SpeculationMode.AUTO, strategy=DraftStrategy.parse(strategy))
        mixed = [request(f"r{i}", seed=i, **({"wish": wish} if i else {"temperature": 0.0})) for i in range(4)]
        found = await asyncio.gather(*(collect(service, one) for one in mixed))
    assert [len(tokens) for tokens, _ in found] == [40] * 4
    assert drafter.num_sent
