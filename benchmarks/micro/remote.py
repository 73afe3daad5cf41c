"""Tokens per second with the drafter as a process on loopback, over those with it in the verifier's process.

    python benchmarks/micro/remote.py [--turns 20] [--target MODEL] [--draft MODEL] [--out FILE.json]

Four sessions that verify whole trees; without models given, tables whose target takes 20 ms a step. Runs alternate; reported are the
medians of the ratios of paired runs, with the interval that holds the median in 95 of 100 cases. And the same of rounds per second, which
the luck of what either side draws does not move: both verify trees of one size and law.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.environment import described
from benchmarks.generations import Load, measured
from benchmarks.processes import service
from drafter_service.__main__ import build
from drafter_service.settings import DrafterSettings
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode
from rootward.engine.loading import load_model
from rootward.engine.threads import use_threads
from rootward.ports import Drafter
from rootward.wire.clients import RemoteDrafter
from verifier_service.policy import Policy
from verifier_service.service import VerifierService

TABLE = "tabular:vocab=512,seed=1,order=1,sharpness=3"
LAWS = {"sampled": (Rule.TRAVERSAL, DraftMode.SAMPLED), "coupled": (Rule.MATCH, DraftMode.COUPLED)}
SESSIONS, TOKENS = 4, 320


@asynccontextmanager
async def deployed(given: argparse.Namespace, *, remote: bool) -> AsyncIterator[VerifierService]:
    """A verifier with its drafter in this process, or as another."""
    target = load_model(given.target, max_slots=8)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        if remote:
            drafter: Drafter = await enter(
                RemoteDrafter(await enter(service("drafter_service", "--model", given.draft)))
            )
        else:
            settings = DrafterSettings(model=given.draft)
            drafter = await enter(build(load_model(given.draft, max_slots=settings.max_num_seqs), settings))
        policy = Policy(draft_wait_s=5.0)
        verifier = VerifierService(target, {"d": drafter}, worker="verifier", incarnation=3, policy=policy)
        await enter(verifier)
        while not verifier.pool.up:
            await asyncio.sleep(0.01)
        yield verifier


async def compared(law: str, given: argparse.Namespace) -> dict[str, Any]:
    """Ratios of paired turns."""
    tokens: list[float] = []
    rounds: list[float] = []
    wish = Speculation(SpeculationMode.REQUIRED, *LAWS[law])
    async with deployed(given, remote=False) as local, deployed(given, remote=True) as remote:
        for turn in range(given.turns + 1):  # the first one warms up
            load = Load(SESSIONS, TOKENS, wish, f"{law}-{turn}")
            found = {}
            for system in (local, remote) if turn % 2 else (remote, local):
                found[system] = await measured(system, load)
            tokens.append(found[remote].rate / found[local].rate)
            rounds.append(tokens[-1] * found[local].block_efficiency / found[remote].block_efficiency)
    return {
        "law": law,
        "turns": given.turns,
        "tokens_per_s": interval(tokens[1:]),
        "rounds_per_s": interval(rounds[1:]),
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and order statistics that enclose the true one in at least 95 of 100 cases, if there are six or more."""
    ordered, n = sorted(values), len(values)
    outside, rank, chance = 0.0, 0, 0.5**n
    while rank < n // 2 and 2 * (outside + chance) <= 0.05:
        outside += chance
        rank += 1
        chance *= (n - rank + 1) / rank
    rank = max(rank - 1, 0)
    found = {"median": float(np.median(ordered)), "low": ordered[rank], "high": ordered[n - 1 - rank]}
    return {name: round(value, 3) for name, value in found.items()}


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=20, help="pairs of runs")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--target", default=f"{TABLE},step_ms=20", help="model of the verifier")
    parser.add_argument("--draft", default=f"{TABLE},noise=0.6,noise_seed=2", help="model of the drafter")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    use_threads(1)
    gc.collect()
    gc.freeze()  # as a service does at its start
    report = {**described(), "target": given.target, "draft": given.draft, "remote_of_local": []}
    for law in given.laws:
        report["remote_of_local"].append(await compared(law, given))
        print(json.dumps(report["remote_of_local"][-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    uvloop.run(main())
