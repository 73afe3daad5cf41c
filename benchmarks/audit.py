"""The audit of drafters on a real pair: draws until the alarm for each cheat, false alarms, and cost.

    python -m benchmarks.audit --json results.json

A verifier in this process audits a drafter process over gRPC while sessions decode at temperature 1. On the shipped pair each cheat
(`benchmarks.dishonest`) runs until it is caught, several times, and an honest drafter for the cost. Honest draws in great number come from
a drafter of tables over the same wire, and are simulated from the rows that the honest drafter of the shipped pair declared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.results import save
from benchmarks.services import address_of
from rootward import demo
from rootward.core.arrays import Floats, Ints
from rootward.core.audit import ALPHA, Draws, Record, log_mean
from rootward.core.requests import DraftMode, Rule, Sampling, Speculation, SpeculationMode, Stopping, VerifierRequest
from rootward.discovery.sources import StaticDiscovery
from rootward.engine.loading import load_model
from rootward.engine.verify import ForestLaw
from rootward.ports import DEFAULT_POOL, LanguageModel
from rootward.wire.clients import RemoteDrafter
from verifier_service import audit
from verifier_service.service import VerifierService
from verifier_service.settings import VerifierSettings

DRAFTER = "d"
TABLES = "tabular:vocab=64,seed=1,sharpness=2"
DRAFT_TABLES = f"{TABLES},noise=0.4,noise_seed=1"
PAIRS = ("shipped", "tables")
CHEATS = ("argmax", "argmax:0.05", "temperature:0.5", "temperature:0.8", "best-of:2", "peek", "boost:0.1")
SESSIONS, TOKENS = 8, 128
TABLE_SESSIONS, TABLE_NODES = 16, 64
MOST_DRAWS = 60_000  # of a run through the services
BATCH = 256  # draws evaluated together, as verifiers do
DRAWS = ForestLaw.draws
WIDTH = 64  # atoms of a row that are kept


@dataclass(frozen=True)
class Load:
    """Sessions at once, each of TOKENS tokens."""

    sessions: int
    prompts: list[tuple[int, ...]]
    num_draft_tokens: int = 16


class Verifier:
    """A verifier in this process under load, with the draws that its audit sees."""

    def __init__(self, service: VerifierService, load: Load) -> None:
        self.service = service
        self._load = load
        self._prompts = itertools.cycle(load.prompts)
        self._numbers = itertools.count()
        self.seen: list[Draws] | None = None
        self.draws_at_alarm = 0
        self.audit_s = 0.0
        self.rounds = 0
        observe = service.audit.observe

        def timed_observe(drafter: str, new: Draws) -> None:
            with self._timed():
                observe(drafter, new)
            self.rounds += 1
            if self.record.caught and not self.draws_at_alarm:
                self.draws_at_alarm = self.record.record.num_draws
            if self.seen is not None and len(new):
                self.seen.append(new)

        def timed_draws(law: ForestLaw) -> list[Draws]:
            with self._timed():
                return DRAWS(law)

        service.audit.observe = timed_observe  # type: ignore[method-assign, assignment]
        ForestLaw.draws = timed_draws  # type: ignore[method-assign, assignment]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.audit_s += time.perf_counter() - began

    @property
    def record(self) -> audit.Audited:
        return self.service.audit._drafters.get(DRAFTER) or audit.Audited()

    async def load(self, num_draws: int) -> int:
        """Sessions until the drafter is caught or so many draws were seen. The number of draws."""
        self.service.audit._drafters.clear()
        self.draws_at_alarm = 0

        async def one_after_another() -> None:
            while not self.record.caught and self.record.record.num_draws < num_draws:
                number = next(self._numbers)
                wish = Speculation(
                    SpeculationMode.REQUIRED, Rule.TRAVERSAL, DraftMode.SAMPLED, self._load.num_draft_tokens
                )
                wanted = VerifierRequest(
                    f"r{number}",
                    next(self._prompts),
                    Sampling(1.0),
                    Stopping(TOKENS),
                    wish,
                    seed=number,
                )
                async with aclosing(self.service.generate(wanted)) as runs:
                    async for _ in runs:
                        if self.record.caught:
                            break

        await asyncio.gather(*(one_after_another() for _ in range(self._load.sessions)))
        return self.draws_at_alarm or self.record.record.num_draws


@asynccontextmanager
async def audited(model: LanguageModel, command: Sequence[str], load: Load) -> AsyncIterator[Verifier]:
    """A verifier of this model whose only drafter is the process of this command."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(address_of(sys.executable, *command, "--listen", "127.0.0.1:0"))
        settings = VerifierSettings(
            model="as loaded",
            law=DraftMode.SAMPLED,
            local_draft="none",
            draft_wait_ms=5000,
            num_draft_tokens=load.num_draft_tokens,
            num_ahead_tokens=0,
            max_num_batched_tokens=2048,
        )
        service = VerifierService(
            model,
            incarnation=1,
            settings=settings,
            sources=[(DEFAULT_POOL, StaticDiscovery(DRAFTER))],
            dial=lambda _: RemoteDrafter(address),
        )
        verifier = Verifier(await stack.enter_async_context(service), load)
        while not service.pool.up:
            await asyncio.sleep(0.05)
        yield verifier


async def on_tables(num_draws: int) -> dict[str, Any]:
    """An honest drafter of tables over the wire: is it ever caught?"""
    rng = np.random.default_rng(0)
    load = Load(TABLE_SESSIONS, [tuple(p) for p in rng.integers(64, size=(100, 8)).tolist()], TABLE_NODES)
    model = load_model(TABLES, max_slots=TABLE_SESSIONS)
    room = ["--max-num-seqs", "64", "--max-num-batched-tokens", "1024"]  # for every session and the one that follows it
    async with audited(model, ["-m", "drafter_service", "--model", DRAFT_TABLES, *room], load) as verifier:
        num = await verifier.load(num_draws)
        record = verifier.record
    return {"models": [TABLES, DRAFT_TABLES], "draws": num, "caught": record.caught, **wealth(record.record)}


def wealth(record: Record) -> dict[str, float]:
    """Logarithms; either wealth raises the alarm at `alarm`."""
    return {
        "log_wealth": record.log_wealth,
        "alarm": math.log(2 / ALPHA),
        "log_late": log_mean(record.log_late),
    }


async def on_shipped_pair(runs: int, honest_draws: int, cheats: list[str]) -> tuple[dict[str, Any], list[Draws]]:
    paths = demo.paths()
    tokenizer = Tokenizer.from_file(str(paths.target / "tokenizer.json"))
    load = Load(SESSIONS, [tuple(tokenizer.encode(text).ids[:64]) for text in demo.prompts()])
    model = load_model(str(paths.target), max_slots=SESSIONS)
    results: dict[str, Any] = {}
    async with audited(model, ["-m", "drafter_service", "--model", str(paths.draft)], load) as verifier:
        await verifier.load(256)  # warm
        rows = verifier.seen = []
        verifier.audit_s = 0.0
        verifier.rounds = 0
        before_s = step_seconds(verifier.service)
        num = await verifier.load(honest_draws)
        steps_s = step_seconds(verifier.service) - before_s
        results["honest"] = {
            "draws": num,
            "caught": verifier.record.caught,
            **wealth(verifier.record.record),
            "rounds": verifier.rounds,
            "audit_us_a_round": 1e6 * verifier.audit_s / verifier.rounds,
            "step_us_a_round": 1e6 * steps_s / verifier.rounds,
            "audit_share_of_steps": verifier.audit_s / steps_s,
        }
    print("honest", results["honest"], flush=True)
    audit.BATCH_DRAWS = 8  # the resolution of the numbers below; what it is in service decides the cost, above
    for cheat in cheats:
        command = ["-m", "benchmarks.dishonest", "--cheat", cheat, "--model", str(paths.draft)]
        if cheat in ("peek", "best-of:2"):
            command += ["--target", str(paths.target)]
        async with audited(model, command, load) as verifier:
            found = []
            caught = []
            for _ in range(runs):
                found.append(await verifier.load(MOST_DRAWS))
                caught.append(verifier.record.caught)
        results[cheat] = {"median": float(np.median(found)), "draws": found, "caught": caught}
        print(cheat, results[cheat], flush=True)
    return results, rows


def step_seconds(service: VerifierService) -> float:
    samples = (s for family in service.metrics.registry.collect() for s in family.samples)
    return sum(s.value for s in samples if s.name == "rootward_step_duration_seconds_sum")


def kept(rows: list[Draws]) -> Draws:
    """All rows as arrays of one width, of the largest atoms first; atoms beyond it are left out with their mass."""

    def of(one: Draws) -> tuple[Any, Any, Any]:
        order = np.argsort(-one.q, axis=1, kind="stable")[:, :WIDTH]
        parts = (np.take_along_axis(a, order, axis=1) for a in (one.ids, one.q, one.offered))
        pads = ((0, 0), (0, WIDTH - order.shape[1]))
        ids, q, offered = (np.pad(p, pads, constant_values=c) for p, c in zip(parts, (-1, 0, 0), strict=True))
        return ids, q / q.sum(axis=1, keepdims=True), offered

    ids, q, offered = (np.concatenate(parts) for parts in zip(*map(of, rows), strict=True))
    return Draws(ids, q, offered, np.zeros(len(ids), dtype=np.int64))


def drawn(rng: np.random.Generator, weight: Floats) -> Ints:
    cumulative = weight.cumsum(axis=1)
    return np.asarray((cumulative < rng.random((len(weight), 1)) * cumulative[:, -1:]).sum(axis=1)).clip(max=WIDTH - 1)


def offline(rows: Draws, num_draws: int) -> dict[str, Any]:
    """The audit of so many honest draws from these rows, which come in their order, again and again."""
    rng = np.random.default_rng(0)
    record = Record()
    while record.num_draws < num_draws and not record.caught():
        at = (record.num_draws + np.arange(BATCH)) % len(rows)
        q = rows.q[at]
        record.observe(Draws(rows.ids[at], q, rows.offered[at], drawn(rng, q)))
    return {"draws": record.num_draws, "caught": record.caught(), "log_wealth": record.log_wealth}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, default=PAIRS)
    parser.add_argument("--runs", type=int, default=5, help="of each cheat through the services")
    parser.add_argument("--cheats", nargs="*", choices=CHEATS, default=CHEATS, help="through the services")
    parser.add_argument("--honest-draws", type=int, default=20_000, help="of the shipped pair through the services")
    parser.add_argument("--table-draws", type=int, default=1_000_000, help="honest ones of tables through the services")
    parser.add_argument(
        "--offline-draws", type=int, default=2_000_000, help="honest ones from the rows of the shipped pair"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {"alpha": ALPHA}
    if "shipped" in given.pairs:
        results["shipped pair"], rows = asyncio.run(on_shipped_pair(given.runs, given.honest_draws, given.cheats))
        results["simulated"] = offline(kept(rows), given.offline_draws)
    if "tables" in given.pairs:
        results["tables"] = asyncio.run(on_tables(given.table_draws))
    print(json.dumps(results, indent=1))
    if given.json:
        save(given.json, results)


if __name__ == "__main__":
    main()
