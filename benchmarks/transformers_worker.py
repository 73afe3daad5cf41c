"""`transformers.generate` for `benchmarks.peers`: a job per line on stdin, its run per line on stdout."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import StoppingCriteria


class FirstTokenClock(StoppingCriteria):
    """Remembers when the first token was there; never stops."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Worker:
    """A target, its tokenizer, and a draft model or none."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.set_num_threads(given.threads)
        how = {"dtype": getattr(torch, given.dtype), "device_map": given.device}
        self.tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(given.model, **how).eval()
        self.draft = AutoModelForCausalLM.from_pretrained(given.draft, **how).eval() if given.draft else None
        if self.draft is not None and given.assistant_tokens:
            settings = self.draft.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = given.assistant_tokens, "constant"
            settings.assistant_confidence_threshold = 0.0  # always that many

    @torch.inference_mode()
    def run(self, job: dict[str, Any]) -> dict[str, float]:
        clock, start = FirstTokenClock(), time.perf_counter()
        inputs = self.tokenizer(job["prompts"], return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = inputs.to(self.model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if job["temperature"]:
            sampling = {"do_sample": True, "temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
        speculation: dict[str, Any] = {}
        if job["speculative"]:
            speculation = {"assistant_model": self.draft} if self.draft else {"prompt_lookup_num_tokens": 8}
        torch.manual_seed(job["seed"])
        length = job["max_tokens"]
        output = self.model.generate(
            **inputs,
            **sampling,
            **speculation,
            min_new_tokens=length,
            max_new_tokens=length,
            stopping_criteria=[clock],
            pad_token_id=self.tokenizer.pad_token_id,
        )
        seconds = time.perf_counter() - start
        tokens = (output.shape[1] - inputs["input_ids"].shape[1]) * output.shape[0]
        return {"tokens": tokens, "seconds": seconds, "first_token_s": clock.first - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--assistant-tokens", type=int, default=0, help="draft tokens a round; 0: the defaults of generate"
    )
    parser.add_argument("--threads", type=int, default=1)
    worker = Worker(parser.parse_args())
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
