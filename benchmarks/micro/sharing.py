"""What it is worth that sessions wait for each other and share steps (`verifier_service/gathering.py`).

    python benchmarks/micro/sharing.py [--sessions 1 2 4 8 16] [--turns 5] [--out FILE.json]

Two verifiers in this process and one drafter in another; tables whose forwards take 60 and 4 ms. One verifier gathers, the other launches
whoever is ready; they take turns on the same requests. Tokens per second and session, and the ratio of each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from unittest.mock import patch

import uvloop

from benchmarks.environment import described
from benchmarks.generations import Load, measured
from benchmarks.intervals import interval
from benchmarks.processes import service
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode
from rootward.engine.loading import load_model
from rootward.wire.clients import RemoteDrafter
from verifier_service import scheduler
from verifier_service.policy import Policy
from verifier_service.service import VerifierService

TABLE = "tabular:vocab=2048,seed=1,order=1,sharpness=3"
LAWS = {"traversal": (Rule.TRAVERSAL, DraftMode.SAMPLED), "coupled": (Rule.MATCH, DraftMode.COUPLED)}
gathering_s = scheduler.gathering_s


async def run(given: argparse.Namespace) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        draft = f"{TABLE},noise=0.6,noise_seed=2,step_ms={given.draft_ms}"
        address = await enter(service("drafter_service", "--model", draft, "--max-num-seqs", "64"))
        verifiers = {}
        for gathers in (True, False):
            target = load_model(f"{TABLE},step_ms={given.verify_ms}", max_slots=max(given.sessions))
            links = {"d": await enter(RemoteDrafter(address))}
            own = VerifierService(target, links, worker=f"v{gathers}", incarnation=3 + gathers, policy=Policy())
            verifiers[gathers] = await enter(own)
        while not all(verifier.pool.up for verifier in verifiers.values()):
            await asyncio.sleep(0.02)
        for law in LAWS:
            for sessions in given.sessions:
                found.append(await compared(verifiers, law, sessions, given))
                print(json.dumps(found[-1]), flush=True)
    return found


async def compared(
    verifiers: dict[bool, VerifierService], law: str, sessions: int, given: argparse.Namespace
) -> dict[str, object]:
    """One cell of the table: both verifiers, turn after turn."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(given.turns + 1):  # the first one warms up
        for gathers in (True, False) if turn % 2 else (False, True):
            name = f"{law}-{sessions}-{turn}-{gathers}"
            load = Load(
                sessions, given.max_tokens, Speculation(SpeculationMode.AUTO, *LAWS[law]), name, seed=100 * turn
            )
            how = gathering_s if gathers else lambda *_: 0.0
            with patch.object(scheduler, "gathering_s", how):
                rates[gathers].append((await measured(verifiers[gathers], load)).rate)
    together, apart = (values[1:] for values in rates.values())
    ratio = interval([a / b for a, b in zip(together, apart, strict=True)])
    rounded = {name: round(value, 2) for name, value in ratio._asdict().items()}
    medians = {"together": round(median(together), 1), "apart": round(median(apart), 1)}
    return {"law": law, "sessions": sessions, **medians, "ratio": rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=90)
    parser.add_argument("--verify-ms", type=float, default=60.0)
    parser.add_argument("--draft-ms", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = uvloop.run(run(given))
    if given.out is not None:
        settings = {name: value for name, value in vars(given).items() if name != "out"}
        report = {**described(), "settings": settings, "sessions": found}
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
