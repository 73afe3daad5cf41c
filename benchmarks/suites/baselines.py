"""transformers as the baseline: generate, assisted generation and prompt lookup, each tuned on jobs of its own.

The settings tried are those its documentation names: static or dynamic cache; for the assistant the default schedule, the
heuristic one, and constant numbers of draft tokens without the confidence threshold. Assisted generation and prompt lookup
take one sequence at a time: transformers refuses larger batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.suites.paired import Job, Run
from rootward.engine.packed import pack_linears

GENERATE, ASSISTED, LOOKUP = "transformers generate", "transformers assisted", "transformers prompt lookup"
PACKED = "transformers assisted on our packed linears"

WARM_UP_TOKENS = 8

Variants = dict[str, dict[str, Any]]

CACHES: Variants = {"dynamic cache": {}, "static cache": {"cache_implementation": "static"}}
DEFAULT_ASSISTANT: dict[str, Any] = {
    "num_assistant_tokens": None,
    "num_assistant_tokens_schedule": None,
    "assistant_confidence_threshold": None,
}
HEURISTIC: dict[str, Any] = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic_transient",
    "assistant_confidence_threshold": 0.0,
}
LOOKUPS: Variants = {f"{n} tokens": {"prompt_lookup_num_tokens": n} for n in (3, 6, 10)}


def assistants(numbers: Sequence[int]) -> Variants:
    """Settings of the draft's generation configuration."""
    constant = HEURISTIC | {"num_assistant_tokens_schedule": "constant"}
    constants = {f"constant {n}": constant | {"num_assistant_tokens": n} for n in numbers}
    return {"default schedule": DEFAULT_ASSISTANT, "heuristic from 5": HEURISTIC} | constants


class Counted:
    """A network that counts its forwards by what they verify."""

    def __init__(self, network: Any):
        self.network = network
        self.widths: list[int] = []
        self.first_s = 0.0  # when the first of them ended
        network.register_forward_pre_hook(self._count, with_kwargs=True)
        network.register_forward_hook(self._time)

    def _count(self, network: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.widths.append(int(ids.shape[1]))

    def _time(self, *_: Any) -> None:
        if len(self.widths) == 1:
            self.first_s = time.perf_counter()


class Worker:
    """The thread all targets run on, with its number of torch threads."""

    def __init__(self, num_threads: int, thread: ThreadPoolExecutor):
        self.num_threads, self._thread = num_threads, thread

    async def call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._with_threads, function, *args)

    def _with_threads(self, function: Any, *args: Any) -> Any:
        torch.set_num_threads(self.num_threads)
        return function(*args)


class Baseline:
    """One way to call `generate` with several settings of which one is `chosen`."""

    def __init__(
        self, name: str, target: Counted, worker: Worker, variants: Variants, *, draft: Any = None, batched: bool
    ):
        self.name, self.variants = name, variants
        self.most_sessions = None if batched else 1
        self.chosen = next(iter(variants))
        self.trials: dict[str, float] = {}  # tokens per second by setting
        self._target, self._worker, self._draft = target, worker, draft

    async def tune(self, jobs: Sequence[Job]) -> None:
        """Choose the fastest setting over these jobs, cut to half their length, all settings taking turns.

        The first job, cut to a few tokens, warms up and does not count. With a single job the first setting stays.
        """
        names = list(self.variants) if len(jobs) > 1 else [self.chosen]
        seconds = dict.fromkeys(names, 0.0)
        few = min(WARM_UP_TOKENS, jobs[0].max_tokens)
        short = [
            replace(jobs[0], max_tokens=few),
            *(replace(j, max_tokens=max(few, j.max_tokens // 2)) for j in jobs[1:]),
        ]
        for i, job in enumerate(short):
            for name in names:
                self.chosen = name
                run = await self.run(job)
                seconds[name] += run.seconds if i else 0.0
        if len(jobs) > 1:
            tokens = sum(len(job.prompts) * job.max_tokens for job in short[1:])
            self.trials = {name: tokens / s for name, s in seconds.items()}
            self.chosen = min(names, key=lambda name: seconds[name])

    async def run(self, job: Job) -> Run:
        found: Run = await self._worker.call(self._run, job)
        return found

    @torch.inference_mode()
    def _run(self, job: Job) -> Run:
        network = self._target.network
        ids, mask = padded(job.prompts, network.device)
        kwargs = self._kwargs(job)
        self._target.widths.clear()
        torch.manual_seed(job.seed)
        start_s = time.perf_counter()
        out = network.generate(input_ids=ids, attention_mask=mask, **kwargs)
        tokens = out[:, ids.shape[1] :].tolist()
        run = Run(tokens, time.perf_counter() - start_s, first_s=self._target.first_s - start_s, first=len(tokens))
        return self._counted(run, int(ids.shape[1]))

    def _kwargs(self, job: Job) -> dict[str, Any]:
        setting = self.variants[self.chosen]
        kwargs: dict[str, Any] = {"max_new_tokens": job.max_tokens, "eos_token_id": None, "pad_token_id": 0}
        if job.temperature:
            kwargs |= {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        else:
            kwargs |= {"do_sample": False}
        if self._draft is None:
            return kwargs | setting
        for name, value in setting.items():
            setattr(self._draft.generation_config, name, value)
        return kwargs | {"assistant_model": self._draft}

    def _counted(self, run: Run, prompt_len: int) -> Run:
        widths = self._target.widths
        drafted = [widths[0] - prompt_len, *(w - 1 for w in widths[1:])]
        run.passes = len(widths) * len(run.tokens)
        run.drafted, run.speculated = sum(drafted), sum(d > 0 for d in drafted)
        # A pass makes one token of the target's own, but the last run of accepted tokens may be cut at max_new_tokens.
        run.accepted = max(0, len(run.tokens[0]) - len(widths)) if run.drafted else 0
        return run


def padded(prompts: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask, int64[B, L]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def network_of(folder: Path, device: str, dtype: str) -> Any:
    """A model as transformers loads it, with a generation configuration that asks for nothing."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)
    network.generation_config = GenerationConfig(pad_token_id=0)
    return network


def baselines(
    target: Path, draft: Path, worker: Worker, numbers: Sequence[int], device: str, dtype: str, *, packed: bool
) -> list[Baseline]:
    """All of them on one copy of the target; with `packed` one more on a copy whose linears are ours."""
    network, small = Counted(network_of(target, device, dtype)), network_of(draft, device, dtype)
    found = [
        Baseline(GENERATE, network, worker, CACHES, batched=True),
        Baseline(ASSISTED, network, worker, assistants(numbers), draft=small, batched=False),
        Baseline(LOOKUP, network, worker, LOOKUPS, batched=False),
    ]
    if packed:
        other = network_of(target, device, dtype)
        sample = torch.tensor([[1, 2, 3]], device=device)
        pack_linears(other, lambda: other(input_ids=sample, use_cache=False).logits)
        found.append(Baseline(PACKED, Counted(other), worker, assistants(numbers), draft=small, batched=False))
    return found
