"""Speculation against plain decoding, end to end on one device: verifier and drafter as objects in this process, no rpc layer.

Target: the demo target **inflated** to an 8 B shape where it runs; draft: the demo draft; prompts: the held-out ones. Step times are those
of the large shape, acceptance and text those of the small pair, not of a real large model. Both systems share the weights and record
their steps alike; they do the same jobs in turn, and what counts is the median of the ratios. The drafter shares the device.

    python -m benchmarks.gpu.end_to_end --out end_to_end.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.contexts import tokenised
from benchmarks.gpu.large import LARGE, TINY_INFLATED, Network, difference, inflated_network
from benchmarks.gpu.measuring import head_of, model_of, parser, recorded, settle, tell
from benchmarks.suites.models import Prompts
from benchmarks.suites.paired import Job, Paired, Run, measure
from drafter_service.growing import Grower
from drafter_service.service import DrafterService, Key
from rootward import demo
from rootward.core.growth import Policy as GrowthPolicy
from rootward.core.requests import DraftMode, Finish, Sampling, Stopping, VerifierRequest
from rootward.engine.model import HuggingFaceModel
from rootward.engine.tokenizers import load_tokenizer
from verifier_service.cost import measure as measure_cost
from verifier_service.policy import Policy
from verifier_service.service import VerifierService

PLAIN, SPECULATION = "plain", "speculation"
TARGET = "one session: speculation faster than plain at every temperature; at every load at least 0.97 of it"
NEVER_BELOW, START_S, PAUSE_S = 0.97, 180.0, 0.05
LONGEST_PROMPT = 192
COLUMNS = (
    "temperature",
    "sessions",
    "plain_tokens_per_s",
    "speculation_tokens_per_s",
    "speedup",
    "low",
    "high",
    "tokens_per_pass",
    "same_text",
)
# The services' own defaults; their settings are not read here, since they need more packages.
POLICY = Policy(law=DraftMode.GREEDY, num_draft_tokens=16, max_depth=8, topk=4, law_atoms=32, draft_wait_s=0.2)
GROWTH = GrowthPolicy(DraftMode.SAMPLED, draws_per_level=4, acceptance=0.7, later=0.2)
_numbers = itertools.count(1)


class Ours:
    """A verifier, with a drafter or without."""

    most_sessions: int | None = None
    chosen = ""

    def __init__(self, name: str, verifier: VerifierService):
        self.name, self.verifier = name, verifier

    async def run(self, job: Job) -> Run:
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(self._answer(job, i) for i in range(len(job.prompts))))
        run = Run([tokens for tokens, _ in answers], time.perf_counter() - start_s)
        for stats in (finish.stats for _, finish in answers):
            run.passes += stats.num_spec_steps + stats.num_plain_steps
            run.drafted += stats.num_draft_tokens
            run.accepted += stats.num_accepted_draft_tokens
            run.speculated += stats.num_spec_steps
        return run

    async def _answer(self, job: Job, i: int) -> tuple[list[int], Finish]:
        stopping, seed = Stopping(job.max_tokens, ignore_eos=True), job.seed * 1000 + i
        name = f"job-{next(_numbers)}"
        request = VerifierRequest(name, job.prompts[i], Sampling(job.temperature), stopping, seed=seed)
        tokens: list[int] = []
        finish = None
        async for run in self.verifier.generate(request):
            tokens += run.tokens
            finish = run.finish
        assert finish is not None
        return tokens, finish


@asynccontextmanager
async def systems(
    plain: HuggingFaceModel, target: HuggingFaceModel, draft: HuggingFaceModel, sessions: int
) -> AsyncIterator[list[Ours]]:
    """A verifier alone, and one with a drafter."""
    grower: Grower[Key] = Grower(draft, incarnation=1, policy=GROWTH, group=lambda key: key[0])
    grower.demand.rows = min(256, sessions * GROWTH.draws_per_level)
    drafter = DrafterService(draft, grower, worker="drafter", capacity=sessions)
    alone = VerifierService(plain, {}, worker="plain", incarnation=2, policy=POLICY)
    cost = measure_cost(target)
    paired = VerifierService(target, {"d": drafter}, worker="verifier", incarnation=3, policy=POLICY, cost=cost)
    async with drafter, alone, paired:
        async with asyncio.timeout(START_S):
            while not paired.pool.up:
                await asyncio.sleep(0.01)
        yield [Ours(PLAIN, alone), Ours(SPECULATION, paired)]


def small_model(args: argparse.Namespace, folder: Any) -> Network:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).to(args.device).eval()


def models(args: argparse.Namespace) -> tuple[list[HuggingFaceModel], dict[str, Any]]:
    """Target for plain decoding, target for speculation (the same weights), draft; and what the report says of them."""
    paths, most = demo.paths(), max(args.sessions)
    small = small_model(args, paths.target)
    shape = TINY_INFLATED if args.smoke else LARGE
    large = inflated_network(small, shape, args.device, getattr(torch, args.dtype))
    about = {"original_parameters": small.num_parameters(), "largest_difference": difference(small, large)}
    tokenizer = load_tokenizer(str(paths.target))
    fits = {"max_slots": max(2, most), "max_len": LONGEST_PROMPT + args.max_tokens, "tokenizer": tokenizer}
    targets = [model_of(large, args, name="inflated", pack=False, **fits) for _ in range(2)]
    drafts = argparse.Namespace(no_cuda_graphs=args.no_cuda_graphs or args.no_draft_graphs)
    draft = model_of(small_model(args, paths.draft), drafts, name="draft", pack=False, **fits)
    return [*targets, draft], about


async def measured(args: argparse.Namespace, ours: Sequence[Ours]) -> list[dict[str, Any]]:
    """One row for every temperature and load."""
    texts = tokenised(demo.prompts(), load_tokenizer(str(demo.paths().target)), LONGEST_PROMPT)
    rows = []
    for temperature, sessions in itertools.product(args.temperatures, args.sessions):
        prompts = Prompts(texts, seed=0)
        jobs = [
            Job(prompts.take(sessions, 0), temperature, args.max_tokens, s) for s in range(args.warm_up + args.repeats)
        ]
        for job, system in itertools.product(jobs[: args.warm_up], ours):
            await system.run(job)
        paired = await measure(ours, jobs[args.warm_up :], 0, lambda: asyncio.sleep(PAUSE_S))
        rows.append({"temperature": temperature, "sessions": sessions} | row_of(paired))
    return rows


def row_of(paired: Paired) -> dict[str, Any]:
    ratio = paired.ratio(SPECULATION, PLAIN)
    speeds = {f"{name}_tokens_per_s": paired.tokens_per_s(name) for name in (PLAIN, SPECULATION)}
    runs = {name: [run.numbers() for run in runs] for name, runs in paired.runs.items()}
    found = {"speedup": ratio.median, "low": ratio.low, "high": ratio.high, "coverage": ratio.coverage}
    counts = {
        "tokens_per_pass": paired.tokens_per_pass(SPECULATION),
        "same_text": paired.same_text(SPECULATION, PLAIN),  # of T = 0: rounding may part near ties
        "runs": runs,
    }
    return speeds | found | counts


async def run(args: argparse.Namespace) -> dict[str, Any]:
    (plain, target, draft), about = models(args)
    async with systems(plain, target, draft, max(args.sessions)) as ours:
        rows = await measured(args, ours)
    reached = all(row["speedup"] >= NEVER_BELOW and (row["sessions"] > 1 or row["speedup"] > 1) for row in rows)
    graphs = {"plain": recorded(plain), "target": recorded(target), "draft": recorded(draft)}
    draft_size = {"draft_parameters": draft.info.num_parameters, "inflated": True}
    found = about | draft_size | {"max_tokens": args.max_tokens, "steps": graphs, "rows": rows, "reached": reached}
    return head_of(args, target, "end to end", TARGET) | found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.set_defaults(repeats=7)
    options.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    options.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options.add_argument("--no-draft-graphs", action="store_true", help="launch the draft's steps from Python")
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument(
        "--warm-up", type=int, default=3, help="jobs that are not counted: steps are recorded, costs learned"
    )
    args = options.parse_args(argv)
    settle(args, sessions=[1, 2], max_tokens=8, warm_up=1, repeats=1)
    report = asyncio.run(run(args))
    size = report["original_parameters"] / 1e6
    print(
        f"The target is INFLATED from {size:.2f} M parameters; acceptance is a property of the small pair, not of a real large model."
    )
    tell(report, COLUMNS, args.out)
    return report


if __name__ == "__main__":
    main()
