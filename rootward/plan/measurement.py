"""Load on services of a pair, seen by a client: tokens per second, and tokens per round with trees of fixed sizes.

Everything that a user's tokens pay for is in the figures: gateway, wire, client, the controller's trials, and processes that compete for
the same cores. Kinds of decoding take turns, so that all of them see the same speed of the machine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rootward.addresses import open_local
from rootward.client import AsyncClient, SamplingParams, Speculation

TURNS = 2  # of the kinds of decoding, for each temperature and load
AUTO, PLAIN = Speculation(mode="auto"), Speculation(mode="disabled")
SIZES = (2, 4, 8, 16, 32, 64, 128)  # nodes of the trees that are measured, and the most that a round may have
NUM_ANSWERS = 8  # that are written beforehand at each temperature
LEAST_ROUNDS = 8  # of each session before a window ends, however slow the machine is
LEARNING_ROUNDS = 128  # of each session before `auto` is measured, in which the controller learns the value of sizes
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly
SETTLE_S = 0.1  # until the services have freed what was cancelled
SCRAPE_TIMEOUT_S = 10.0
Done = Callable[[float], None]  # told the share that is done, in [0, 1]


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Seconds and number of engine steps since a verifier started, prefill excluded, and seconds of them in which a draft head ran."""

    steps_s: float = 0.0
    num_steps: float = 0.0
    head_s: float = 0.0

    def __sub__(self, before: EngineTime) -> EngineTime:
        return EngineTime(self.steps_s - before.steps_s, self.num_steps - before.num_steps, self.head_s - before.head_s)

    def __add__(self, other: EngineTime) -> EngineTime:
        return EngineTime(self.steps_s + other.steps_s, self.num_steps + other.num_steps, self.head_s + other.head_s)

    @property
    def forward_s(self) -> float:
        """Mean seconds of a step without the draft head; 0 if there was none."""
        return (self.steps_s - self.head_s) / self.num_steps if self.num_steps else 0.0

    @property
    def draft_head_s(self) -> float:
        """Mean seconds of the draft head in a step; 0 if there was none."""
        return self.head_s / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of a request that arrived together. accepted: of each, whether it was drafted."""

    at_s: float
    request: int
    accepted: tuple[bool, ...]


@dataclass(slots=True)
class Run:
    """What arrived from `load` sessions in `seconds`. accepted: rounds by number of accepted draft tokens."""

    load: int
    seconds: float = 0.0
    tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    engine: EngineTime = field(default_factory=EngineTime)

    def add(self, other: Run) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.accepted += other.accepted
        self.engine += other.engine

    @property
    def rate(self) -> float:
        """Tokens per second of all sessions together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        rounds = self.accepted.total()
        return 1.0 + sum(n * times for n, times in self.accepted.items()) / rounds if rounds else 1.0

    @property
    def round_s(self) -> float:
        """Seconds from one round of a session to the next."""
        return self.load * self.tokens_per_round / self.rate if self.rate else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one temperature and load.

    plain    without speculation
    auto     as the services speculate by themselves
    lookup   the same without the draft, from n-grams alone; None if the draft is nothing else
    trees    by number of nodes: trees of the draft with so many in every round
    """

    temperature: float
    load: int
    plain: Run
    auto: Run
    lookup: Run | None
    trees: dict[int, Run]

    def draft_s(self, nodes: int) -> float:
        """Seconds of a round in which the engine waits for drafts, or runs a draft head: all that is neither a forward nor in a plain
        round, and at least the time of the head, which the verifier measures."""
        trees, plain = self.trees[nodes], self.plain
        if not trees.engine.num_steps or not plain.engine.num_steps:
            return 0.0
        around_s = plain.round_s - plain.engine.forward_s
        return max(trees.engine.draft_head_s, trees.round_s - trees.engine.forward_s - around_s)

    def row_s(self, nodes: int) -> float:
        """Seconds that the rows of the nodes add to a forward."""
        trees, plain = self.trees[nodes].engine, self.plain.engine
        return max(0.0, trees.forward_s - plain.forward_s) if trees.num_steps and plain.num_steps else 0.0


class LoadGenerator:
    """Sends prompts (token ids) from as many sessions as asked for, again and again.

    A window begins anywhere in the texts, not with their beginnings, in which n-grams find nothing: the first request of a session goes on
    with a part of an answer that was written before (`write_answers`). The places are spread evenly, so that about as many prompts are read
    in each window, and are the same in all windows of a series. Each window has a cache salt of its own, so that no drafts are looked up in
    the answers of an earlier window to the same prompts.

    admin: HTTP address of the verifier's metrics, "": unknown.
    """

    def __init__(
        self,
        client: AsyncClient,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        admin: str = "",
        first_seed: int = 0,
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._admin = admin
        self._first_seed = first_seed
        self._windows = count()
        self._answers: dict[float, list[tuple[int, ...]]] = {}

    async def write_answers(self, temperature: float, *, load: int) -> None:
        """Answers to the first prompts, `load` at a time."""
        prompts = list(self._prompts[:NUM_ANSWERS])
        sampling = SamplingParams(temperature=temperature, max_tokens=self._max_tokens)
        found = await self._client.generate_many(prompts, at_once=load, sampling=sampling)
        self._answers[temperature] = [one.token_ids for one in found]

    async def run(
        self,
        *,
        load: int,
        temperature: float,
        speculation: Speculation,
        seconds: float,
        series: int,
        rounds: int = LEAST_ROUNDS,
    ) -> Run:
        """All sessions run from the beginning of the window to its end, for these seconds and at least so many rounds each. Windows of the
        same series send the same requests. The first failure of a request is raised."""
        arrived: list[Arrival] = []
        begun = asyncio.Semaphore(0)
        salt = f"window {self._first_seed} {next(self._windows)}"
        first_number = self._first_seed + series * load

        async def session(numbers: Iterable[int]) -> None:
            """Requests with these numbers one after the other; `begun` is released once, with the first token."""
            is_first = True
            for number in numbers:
                prompt, max_tokens = self._prompts[number % len(self._prompts)], self._max_tokens
                if is_first:
                    prompt, max_tokens = self._begun_text(number, temperature)
                sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
                async for delta in self._client.stream(
                    prompt, sampling=sampling, speculation=speculation, cache_salt=salt
                ):
                    if delta.accepted:
                        arrived.append(Arrival(time.perf_counter(), number, delta.accepted))
                    if is_first:
                        begun.release()
                        is_first = False

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(session(count(first_number + i, load))) for i in range(load)]
                for _ in tasks:
                    await begun.acquire()
                engine_before = await self._engine_time()
                begun_s = time.perf_counter()
                first = len(arrived)
                await asyncio.sleep(seconds)
                while len(arrived) - first < rounds * load:
                    await asyncio.sleep(seconds / 4)
                ended_s = time.perf_counter()
                engine = await self._engine_time() - engine_before
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        await asyncio.sleep(SETTLE_S)
        counted = [one for one in arrived if begun_s <= one.at_s < ended_s]
        tokens = sum(len(one.accepted) for one in counted)
        return Run(load, ended_s - begun_s, tokens, accepted_by_round(counted), engine)

    def _begun_text(self, number: int, temperature: float) -> tuple[Sequence[int], int]:
        """A prompt with a part of its answer, and how many tokens may follow."""
        answers = self._answers[temperature]
        chosen = number % len(answers)
        length = int(number * GOLDEN % 1.0 * len(answers[chosen]))
        return [*self._prompts[chosen], *answers[chosen][:length]], self._max_tokens - length

    async def _engine_time(self) -> EngineTime:
        return await asyncio.to_thread(engine_time, self._admin) if self._admin else EngineTime()


async def measure(
    generator: LoadGenerator,
    *,
    temperatures: Sequence[float],
    loads: Sequence[int],
    most_nodes: int,
    lookup: Speculation | None,
    drafter: str,
    seconds: float,
    done: Done,
) -> list[Measured]:
    """lookup: what asks for drafts from n-grams alone, None: not measured; drafter: by whom trees of fixed sizes are grown ("": by any
    drafter, but not by look-up); seconds: of all windows together, shared alike by the temperatures and loads."""
    sizes = [*(size for size in SIZES if size < most_nodes), most_nodes]
    trees = {size: Speculation(mode="required", num_draft_tokens=size, drafter=drafter) for size in sizes}
    windows = {PLAIN: 2, AUTO: 2, **({lookup: 1} if lookup is not None else {}), **dict.fromkeys(trees.values(), 1)}
    pairs = [(temperature, load) for temperature in temperatures for load in loads]
    window_s = seconds / len(pairs) / (TURNS * sum(windows.values()) + 1)  # the controller learns for one window
    found = []
    for i, (temperature, load) in enumerate(pairs):
        if load == loads[0]:
            await generator.write_answers(temperature, load=max(loads))
        here: dict[str, Any] = {"load": load, "temperature": temperature}
        await generator.run(**here, speculation=AUTO, seconds=window_s, series=TURNS, rounds=LEARNING_ROUNDS)
        runs = {speculation: Run(load) for speculation in windows}
        for turn in range(TURNS):
            for speculation, number in windows.items():
                run = await generator.run(**here, speculation=speculation, seconds=number * window_s, series=turn)
                runs[speculation].add(run)
            done((i + (turn + 1) / TURNS) / len(pairs))
        found.append(
            Measured(
                temperature,
                load,
                plain=runs[PLAIN],
                auto=runs[AUTO],
                lookup=runs[lookup] if lookup is not None else None,
                trees={size: runs[speculation] for size, speculation in trees.items()},
            )
        )
    return found


def accepted_by_round(arrivals: Iterable[Arrival]) -> Counter[int]:
    """Rounds by number of accepted tokens: of each request, the accepted tokens before every bonus token."""
    found: Counter[int] = Counter()
    open_rounds: Counter[int] = Counter()  # by request: tokens accepted since its last bonus token
    for one in arrivals:
        for is_accepted in one.accepted:
            if is_accepted:
                open_rounds[one.request] += 1
            else:
                found[open_rounds.pop(one.request, 0)] += 1
    return found


def engine_time(admin: str) -> EngineTime:
    """Of the verifier with this admin address (host:port)."""
    with open_local(f"http://{admin}/metrics", timeout_s=SCRAPE_TIMEOUT_S) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("kind") != "prefill":
                totals[sample.name] += sample.value
    return EngineTime(
        totals["rootward_step_duration_seconds_sum"],
        totals["rootward_step_duration_seconds_count"],
        totals["rootward_draft_head_seconds_total"],
    )
