"""`lm-eval` as its users run it, against /v1/completions: what it scores is what the model says, to the last bit.

It lives in an environment of its own, made for the run: it needs far more than a server or its tests do. Skipped where its package
cannot be had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rootward import SamplingParams, demo

TASKS = Path(__file__).with_name("lm_eval")
PACKAGE = "lm-eval[api]==0.4.13"
INSTALL_S, RUN_S = 900, 600
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "0",
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(INSTALL_S + RUN_S)]


@dataclass(frozen=True)
class Scored:
    """One continuation of one context, as lm-eval reports it."""

    context: str
    continuation: str
    logprob: float
    greedy: bool


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command."""
    folder = tmp_path_factory.mktemp("lm-eval")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
    made = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, timeout=INSTALL_S)
    if made.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed here: {made.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "lm_eval"


@pytest.fixture(scope="module")
def samples(evaluate: Path, stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Every sample of both tasks, by task. Tokens are made by the server, too."""
    out, cache = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("cache")
    model = {
        "model": stack.client.server_info().models[0].name,
        "base_url": f"{stack.gateway.http}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": "1",  # side by side, sums of floats have another order
        "max_retries": "1",
        "max_length": "512",
    }
    command = [evaluate, "--model", "local-completions", "--model_args", ",".join(f"{k}={v}" for k, v in model.items())]
    command += ["--tasks", "rootward_continuations,rootward_answers", "--include_path", TASKS]
    command += ["--output_path", out, "--log_samples"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = kept | OFFLINE | {"HF_HOME": str(cache)}
    run = subprocess.run(command, cwd=TASKS, env=env, capture_output=True, text=True, timeout=RUN_S)
    assert run.returncode == 0, run.stderr[-3000:]
    found = {}
    for path in out.rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_rootward_").rpartition("_")[0]
        found[task] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert set(found) == {"continuations", "answers"}
    return found


def scored(samples: list[dict]) -> Iterator[Scored]:
    for sample in samples:
        for i, (answer,) in enumerate(sample["resps"]):
            context, continuation = (sample["arguments"][f"gen_args_{i}"][f"arg_{k}"] for k in range(2))
            yield Scored(context, continuation, float(answer[0]), answer[1] in (True, "True"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.paths().target)


def split(tokenizer, one: Scored) -> tuple[list[int], int]:
    """What lm-eval sends, and how many of its tokens are context. To it blanks at the end of a context belong to what follows, and a
    token that lies across the seam counts for neither side."""
    context, whole = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (one.context.rstrip(), one.context + one.continuation)
    )
    return [*context, *whole[len(context) :]], len(context)


def test_scores_equal_the_prompt_logprobs_of_the_grpc_api(samples, stack, tokenizer) -> None:
    """Exactly: the other face, other messages, the same numbers."""
    seen = list(scored(samples["continuations"]))
    assert len(seen) == 18
    for one in seen:
        whole, begin = split(tokenizer, one)
        wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        told = stack.client.generate(whole, sampling=wanted).prompt_logprobs[begin - 1 :]
        assert len(told) == len(whole) - begin > 0
        assert one.logprob == sum(t.logprob for t in told), one
        assert one.greedy == all(t.logprob == max(p for _, p in t.top) for t in told), one


def test_scores_are_the_models_own(samples, tokenizer) -> None:
    """By one plain forward pass in double precision."""
    model = AutoModelForCausalLM.from_pretrained(demo.paths().target, dtype=torch.float64)
    for one in scored(samples["continuations"]):
        whole, begin = split(tokenizer, one)
        with torch.no_grad():
            law = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        own = sum(float(law[i - 1, whole[i]]) for i in range(begin, len(whole)))
        assert one.logprob == pytest.approx(own, abs=1e-4), one


def test_the_likeliest_is_chosen(samples) -> None:
    for sample in samples["continuations"]:
        values = [float(answer[0]) for (answer,) in sample["resps"]]
        assert sample["acc"] == float(values.index(max(values)) == sample["doc"]["answer"])


def test_answers_end_at_the_stop_string(samples, stack) -> None:
    for sample in samples["answers"]:
        (answer,) = sample["resps"][0]
        wanted = SamplingParams(temperature=0, max_tokens=12, stop=("\n",))
        assert answer == stack.client.generate(sample["doc"]["context"], sampling=wanted).text
        assert "\n" not in answer
