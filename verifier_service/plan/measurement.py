"""Rounds of a target and a draft on prompts, made and timed in this process by the parts that serve them.

Sessions generate side by side, as many as the load; for a block of steps every round asks for the same number of nodes, then for another.
So all numbers see the same text and the same speed of the machine. Prompts are read outside of the measured time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, cycle, pairwise
from statistics import median

import numpy as np

from rootward.core.frames import Commit, extend_hash
from rootward.core.growth import BestFirst
from rootward.core.living_tree import Snapshot
from rootward.core.requests import (
    DraftMode,
    Sampling,
    Speculation,
    SpeculationMode,
    Stopping,
    VerifierRequest,
)
from rootward.engine.grower import Grower
from rootward.engine.head_model import DraftHead
from rootward.errors import ConfigurationError
from rootward.ports import LanguageModel
from rootward.wire.clients import RemoteVerifier
from rootward.wire.server import RpcServer
from verifier_service.head_drafts import HeadDrafts, Wanted
from verifier_service.local_drafts import HEAD, LocalDrafts
from verifier_service.runner import Chunk, Outcome, Round, Runner
from verifier_service.service import VerifierService
from verifier_service.servicer import VerifierServicer
from verifier_service.session import Event, Session, choose_rule
from verifier_service.settings import VerifierSettings
from verifier_service.speculation import SIZES, SpeculationController

BLOCK = 6  # steps with one number of nodes; the first one still has the tree of the block before and is not counted
LEAST_STEPS = 5  # that are counted of every number of nodes, however little time there is
MOST_TURNS = 50  # blocks of a number of nodes in which that many must come
OVERHEAD_TOKENS = 48  # of each session that the overhead of the service is measured with
HOPS = 50  # calls whose median is the time of a message there and back
Done = Callable[[float], None]  # told the share that is done, in [0, 1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one round, in numbers of nodes in draw order from 1: the accepted path, and a longest path of its tree."""

    path: tuple[int, ...]
    longest: tuple[int, ...]


@dataclass(slots=True)
class Cell:
    """Rounds that ask for `nodes` nodes, `load` at a time. step_s: seconds of each step without drafting; draft_s: of drafting."""

    temperature: float
    load: int
    nodes: int
    step_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one pair. overhead_s: what the service adds to a step, by load; hop_s: a message to another process and back; 0 where the draft is
    in the verifier itself. most: largest number of nodes."""

    cells: tuple[Cell, ...]
    overhead_s: dict[int, float]
    hop_s: float
    most: int
    remote: bool  # the draft runs in a process of its own: a distance adds to its answers

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell.temperature for cell in self.cells})

    @property
    def loads(self) -> list[int]:
        return sorted({cell.load for cell in self.cells})

    @property
    def sizes(self) -> list[int]:
        """Numbers of nodes, 0 (plain decoding) among them."""
        return sorted({cell.nodes for cell in self.cells})

    def step_s(self, temperature: float, load: int, nodes: int) -> float:
        """Seconds of a step of the service without drafting; linear in the load between those that were measured."""
        return self._between(temperature, load, nodes, lambda cell: median(cell.step_s) + self.overhead_s[cell.load])

    def draft_s(self, temperature: float, load: int, nodes: int) -> float:
        """Seconds until the drafts of a step have all nodes, without the way to the drafter."""
        return self._between(temperature, load, nodes, lambda cell: median(cell.draft_s) if cell.draft_s else 0.0)

    def _between(self, temperature: float, load: int, nodes: int, value: Callable[[Cell], float]) -> float:
        known = {
            cell.load: value(cell) for cell in self.cells if (cell.temperature, cell.nodes) == (temperature, nodes)
        }
        loads = sorted(known)
        return float(np.interp(load, loads, [known[n] for n in loads]))


class ModelDrafts:
    """Trees of a draft model, grown as its service does, for what a round wants (`head_drafts.Wanted`)."""

    def __init__(self, model: LanguageModel, *, incarnation: int) -> None:
        self._grower: Grower[int] = Grower(model, incarnation=incarnation, best_first=BestFirst())

    def grow(self, wanted: Sequence[Wanted]) -> list[Snapshot | None]:
        for one in wanted:
            self._follow(one)
        self._grower.grow([one.session for one in wanted if one.session in self._grower.trees])
        trees = [self._grower.trees.get(one.session) for one in wanted]
        return [
            growing.tree.snapshot(one.nodes) if growing is not None and len(growing.tree) else None
            for one, growing in zip(wanted, trees, strict=True)
        ]

    def forget(self, session: int) -> None:
        self._grower.close(session)

    def _follow(self, one: Wanted) -> None:
        growing = self._grower.trees.get(one.session)
        if growing is None:
            self._grower.open(one.session, replace(one.opening, prefix=tuple(one.text), node_budget=one.nodes))
            return
        tree = growing.tree
        tokens, hash_after = tuple(one.text[tree.length :]), tree.hash
        for token in tokens:
            hash_after = extend_hash(hash_after, token)
        self._grower.commit(one.session, Commit(one.session, tree.length, tokens, hash_after, node_budget=one.nodes))


class Bench:
    """A target and its draft: a draft model, a draft head, or neither (trees looked up in the text, as `settings.local_draft` says).

    Everything that computes runs on one thread (`engine.threads`): call `measure` on `thread`.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        target: LanguageModel,
        *,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        head: DraftHead | None = None,
        draft: LanguageModel | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # A draft model is asked as a head is: for the tree of the round that begins.
        own = settings if draft is None else settings.model_copy(update={"local_draft": "head:model"})
        self.settings, self.target, self.is_remote = settings, target, draft is not None
        self.runner = Runner(target, heads=None if head is None else HeadDrafts(head, incarnation=seed))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="target-model")
        self._drafts = None if draft is None else ModelDrafts(draft, incarnation=seed)
        self._drafter = "head" if own.local_draft.startswith(HEAD) else ""  # alone, without look-up beside it
        self._local = LocalDrafts(own, target.info.vocab_size, SpeculationController())
        self._texts: Iterator[tuple[int, ...]] = cycle(tuple(prompt) for prompt in prompts)
        self._num_tokens, self._seed, self._clock = num_tokens, seed, clock
        self._numbers = count(1)

    def measure(self, temperatures: Sequence[float], loads: Sequence[int], seconds: float, done: Done) -> Measured:
        """seconds: of measuring, shared alike by all pairs of a temperature and a load. Runs an event loop for a moment."""
        most = self.settings.num_draft_tokens
        sizes = [*(size for size in SIZES if size < most), most]  # that the controller compares
        cells: list[Cell] = []
        pairs = [(temperature, load) for temperature in temperatures for load in loads]
        for i, (temperature, load) in enumerate(pairs):

            def part_done(share: float, part: int = i) -> None:
                done((part + share) / len(pairs))

            part = self.thread.submit(self._cells, temperature, load, sizes, seconds / len(pairs), part_done)
            cells += part.result()
        plain_s = {
            load: median(s for cell in cells if cell.load == load and not cell.nodes for s in cell.step_s)
            for load in loads
        }
        served_s, hop_s = asyncio.run(self._served(loads))
        overhead_s = {load: max(0.0, served_s[load] - plain_s[load]) for load in loads}
        return Measured(tuple(cells), overhead_s, hop_s if self.is_remote else 0.0, most, self.is_remote)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _cells(self, temperature: float, load: int, sizes: Sequence[int], seconds: float, done: Done) -> list[Cell]:
        cells = [Cell(temperature, load, nodes) for nodes in sizes]
        sessions = [self._session(temperature) for _ in range(load)]
        begun_s, turn = self._clock(), 0
        try:
            while (
                lacking := min(len(cell.step_s) for cell in cells) < LEAST_STEPS
            ) or self._clock() - begun_s < seconds:
                if lacking and turn > MOST_TURNS * len(cells):
                    raise ConfigurationError(
                        "--prompts: answers end at once; give prompts that the target goes on with"
                    )
                cell = cells[turn % len(cells)]
                for step in range(BLOCK):
                    fresh = [session for session in sessions if session.counts.num_target_passes == 0]
                    self._step(sessions, cell, counted=turn >= len(cells) and step > 0 and not fresh)
                    for i, session in enumerate(sessions):
                        if session.done:
                            self._close(session)
                            sessions[i] = self._session(temperature)
                turn += 1
                done(min(1.0, (self._clock() - begun_s) / seconds) if seconds else 1.0)
        finally:
            for session in sessions:
                self._close(session)
        return cells

    def _session(self, temperature: float) -> Session:
        """A new one, whose prompt has been read."""
        number = next(self._numbers)
        request = VerifierRequest(
            f"plan-{number}",
            next(self._texts),
            Sampling(temperature),
            Stopping(self._num_tokens),
            Speculation(SpeculationMode.REQUIRED, drafter=self._drafter),
            seed=self._seed + number,
            cache_salt=str(number),
        )
        rule, mode, strategy = choose_rule(request, self.settings.law)
        session = Session(number, request, rule, None, frozenset(self.target.info.eos_ids), strategy, mode)
        self._local.attach(session)
        session.kv_slot = self.target.open()
        session.on(Event.ADMIT)
        while session.prefill_left:
            size = min(session.prefill_left, self.settings.max_num_batched_tokens)
            chunk = Chunk(session.kv_slot, *session.chunk(size), session=number)
            self.runner.prefill([chunk])
            session.feed(size, chunk.told)
        return session

    def _close(self, session: Session) -> None:
        session.end()
        if session.kv_slot is not None:
            self.target.close(session.kv_slot)
            session.kv_slot = None
        self.runner.forget(session.number)
        if self._drafts is not None:
            self._drafts.forget(session.number)

    def _step(self, sessions: Sequence[Session], cell: Cell, *, counted: bool) -> None:
        begun_s = self._clock()
        rounds = [self._round(session, cell.nodes) for session in sessions]
        rounds, draft_s = self._drafted(rounds)
        outcomes = self.runner.verify(rounds)
        for session, outcome in zip(sessions, outcomes, strict=True):
            self._commit(session, outcome)
        if counted:
            cell.step_s.append(self._clock() - begun_s - draft_s)
            if cell.nodes and draft_s:
                cell.draft_s.append(draft_s)
            cell.verdicts += [verdict_of(done, outcome) for done, outcome in zip(rounds, outcomes, strict=True)]

    def _round(self, session: Session, nodes: int) -> Round:
        """As the engine loop makes it, with a tree of so many nodes."""
        self._local.plan(session, min(nodes, session.tokens_left - 1))
        session.on(Event.LAUNCH)
        snapshot, wanted = self._local.launch(session, None), self._local.wanted(session)
        assert session.kv_slot is not None
        return Round(
            kv_slot=session.kv_slot,
            root=session.tokens[-1],
            length=len(session.tokens),
            rule=session.rule,
            sampling=session.request.sampling,
            key=session.key,
            epoch=1,
            snapshot=snapshot,
            prefix=session.prefix,
            num_successors=self._local.num_successors(session),
            copies=session.mode is DraftMode.IID and wanted is not None,
            wanted=wanted,
            session=session.number,
        )

    def _drafted(self, rounds: list[Round]) -> tuple[list[Round], float]:
        if self._drafts is None:
            return self.runner.drafted(rounds)
        wanted = [r.wanted for r in rounds if r.wanted is not None]
        begun_s = self._clock()
        grown = dict(zip((one.session for one in wanted), self._drafts.grow(wanted), strict=True))
        draft_s = self._clock() - begun_s
        return [replace(r, snapshot=grown.get(r.session)) for r in rounds], draft_s

    def _commit(self, session: Session, outcome: Outcome) -> None:
        self._local.learn_successors(session, outcome.successors)
        session.on(Event.COMMIT)
        session.advance(outcome.tokens, outcome.num_nodes, missed=False)
        session.fed = len(session.tokens) - 1

    # -- what the service adds ----------------------------------------------------------------------------------------

    async def _served(self, loads: Sequence[int]) -> tuple[dict[int, float], float]:
        """Seconds of a step of plain decoding through the service and its wire, by load; seconds of a message there and back."""
        service = VerifierService(
            self.target,
            {},
            settings=self.settings.model_copy(update={"local_draft": "none"}),
            worker="plan",
            incarnation=0,
            runner=self.runner,
            thread=self.thread,
        )
        async with service, RpcServer("127.0.0.1:0", grace_s=0.1) as server:
            VerifierServicer(service).register(server)
            await server.start()
            async with RemoteVerifier(server.address) as verifier:
                step_s = {load: await self._plain_step_s(verifier, load) for load in loads}
                hops = []
                for _ in range(HOPS):
                    begun_s = self._clock()
                    await verifier.get_info()
                    hops.append(self._clock() - begun_s)
                return step_s, median(hops)

    async def _plain_step_s(self, verifier: RemoteVerifier, load: int) -> float:
        found = await asyncio.gather(*(self._intervals(verifier) for _ in range(load)))
        return median(seconds for intervals in found for seconds in intervals)

    async def _intervals(self, verifier: RemoteVerifier) -> list[float]:
        """Seconds between the tokens of one session that decodes plainly."""
        number = next(self._numbers)
        request = VerifierRequest(
            f"plain-{number}",
            next(self._texts),
            Sampling(0.0),
            Stopping(min(OVERHEAD_TOKENS, self._num_tokens), ignore_eos=True),
            Speculation(SpeculationMode.DISABLED),
            cache_salt=str(number),
            trees=True,  # so that no two steps come as one run
        )
        times = [self._clock() async for _ in verifier.generate(request)]
        return [after - before for before, after in pairwise(times)][1:]


def verdict_of(done: Round, outcome: Outcome) -> Verdict:
    tree = done.tree
    deepest = int(np.argmax(tree.depth))
    return Verdict(outcome.path, tuple(np.flatnonzero(tree.ancestors[deepest])[1:].tolist()))
