"""How far a draft head should look back: its acceptance behind prompts of several lengths, by the positions that its layer sees.

    python -m benchmarks.head_window --target FOLDER --head FOLDER --out RESULT.json

The target answers passages of this repository's documentation with a question behind each, greedily and by sampling. Then the head reads
each text once for every window. T = 0: share of positions where its likeliest token is the target's. T = 1: sum over tokens of min(p, q).
Without services; no time is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.peers import passages
from benchmarks.results import command, cpu_model, markdown_table, save
from rootward.engine.head_loading import model_of
from rootward.engine.heads import Head, load_head
from rootward.engine.loading import load_model
from rootward.engine.model import HuggingFaceModel
from rootward.engine.threads import use_threads
from rootward.errors import ConfigurationError
from rootward.ports import Rows

TEMPERATURES = (0.0, 1.0)
CHUNK = 256  # rows of a forward of the head


@dataclass(frozen=True, slots=True)
class Answer:
    """A text whose last tokens the target wrote.

    tokens    prompt and answer
    states    float[len(tokens) - 1, S], hidden states of the target at all positions but the last, as `expose` gives them
    target    float32[answer - 1, V], its distributions after each token of the answer but the last
    """

    tokens: list[int]
    states: torch.Tensor
    target: torch.Tensor


@torch.inference_mode()
def answered(model: HuggingFaceModel, prompt: Sequence[int], num_tokens: int, *, greedy: bool, seed: int) -> Answer:
    """The target's answer of `num_tokens` tokens. The states that the head reads are exposed (`expose`)."""
    generator = torch.Generator().manual_seed(seed)
    tokens, unread = list(prompt), list(prompt)
    states, rows = [], []
    slot = model.open()
    try:
        for _ in range(num_tokens):
            (logits,) = model.forward([Rows.chain(slot, 1, unread)], num_logits=[1])
            states.append(model.states.clone())
            model.commit(slot, len(unread), keep_below=False)
            rows.append(logits.float().softmax(-1))
            token = int(logits.argmax()) if greedy else int(torch.multinomial(rows[-1], 1, generator=generator))
            tokens.append(token)
            unread = [token]
    finally:
        model.close(slot)
    return Answer(tokens, torch.cat(states), torch.stack(rows[1:]))


@torch.inference_mode()
def acceptance(model: HuggingFaceModel, head: Head, answer: Answer, *, window: int | None, greedy: bool) -> float:
    """Mean acceptance of a first draft token over the answer, if the layer of the head sees `window` positions (None: all)."""
    head.windows = (window,)
    drafts = model_of(head, model.info, name="head", max_slots=1)
    slot = drafts.open()
    features = drafts.fuse(answer.states).float().cpu().numpy()
    read, last = answer.tokens[1:-1], []
    for start in range(0, len(read), CHUNK):
        part = read[start : start + CHUNK]
        rows = Rows.chain(slot, 1, part, features[start : start + len(part)])
        last.append(drafts.forward([rows]).softmax(-1))
        last = [torch.cat(last)[-len(answer.target) :]]
        drafts.commit(slot, len(part), keep_below=False)
    draft, target = last[0], answer.target
    if greedy:
        return float((draft.argmax(-1) == target.argmax(-1)).float().mean())
    return float(torch.minimum(draft, target).sum(-1).mean())


def measure(given: argparse.Namespace) -> dict[str, Any]:
    from rich.progress import track
    from transformers import AutoTokenizer

    use_threads(given.threads)
    longest = max(given.prompt_tokens)
    room = 2 * longest + given.max_tokens + 256  # a passage that is cut may have more tokens when it is read again
    model = load_model(str(given.target), dtype=given.dtype, max_slots=1, max_len=min(room, given.max_model_len))
    head = load_head(str(given.head), model.network)
    if not isinstance(head, Head):
        raise ConfigurationError(f"--head: {given.head} is a block head; give a head of one layer")
    own = head.windows[0]
    model.expose(head.states)
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    rows = []
    for length in given.prompt_tokens:
        texts = passages(tokenizer, given.passages, length)
        found: dict[tuple[float, int | None], list[float]] = {}
        jobs = [(seed, text, temperature) for seed, text in enumerate(texts) for temperature in TEMPERATURES]
        for seed, text, temperature in track(jobs, description=f"{length} tokens"):
            message = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
            greedy = temperature == 0
            answer = answered(model, prompt, given.max_tokens, greedy=greedy, seed=seed)
            for window in (*given.windows, None):
                value = acceptance(model, head, answer, window=window, greedy=greedy)
                found.setdefault((temperature, window), []).append(value)
        for (temperature, window), values in found.items():
            row = {"prompt_tokens": length, "temperature": temperature, "window": window}
            rows.append(row | {"acceptance": round(mean(values), 4), "of_passages": [round(v, 4) for v in values]})
    return {"format": "rootward-head-window/1", "target": given.target.name, "window_of_head": own, "rows": rows}


def table(report: dict[str, Any]) -> str:
    """Lengths of prompts in rows, windows in columns, for each temperature."""
    rows = report["rows"]
    keys = list(dict.fromkeys((row["temperature"], row["window"]) for row in rows))
    keys.sort(key=lambda key: (key[0], key[1] or sys.maxsize))
    by_length: dict[int, dict[tuple[float, int | None], float]] = {}
    for row in rows:
        by_length.setdefault(row["prompt_tokens"], {})[row["temperature"], row["window"]] = row["acceptance"]
    header = ["prompt, tokens", *(f"T = {temperature:g}, {window or 'all'}" for temperature, window in keys)]
    return markdown_table(header, [[f"{n:,}", *(f"{of[key]:.2f}" for key in keys)] for n, of in by_length.items()])


@command
def main(argv: Sequence[str]) -> None:
    given = parser().parse_args(argv)
    report = measure(given)
    print(f"{report['target']}, {cpu_model()}: acceptance by the positions that the head sees\n\n{table(report)}")
    if given.out is not None:
        save(given.out, report)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.head_window", description=(__doc__ or "").splitlines()[0]
    )
    add = found.add_argument
    add("--target", type=Path, required=True, help="folder of the target model")
    add("--head", type=Path, required=True, help="folder of its draft head")
    add("--windows", type=int, nargs="+", default=[32, 128, 256, 512], help="beside all positions")
    add("--prompt-tokens", type=int, nargs="+", default=[60, 500, 1000, 2000], help="tokens of the passages")
    add("--passages", type=int, default=6, help="of each length (default 6)")
    add("--max-tokens", type=int, default=64, help="tokens of every answer (default 64)")
    add("--max-model-len", type=int, default=8192, help="context of the target (default 8192)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    add("--out", type=Path, help="JSON result")
    return found


if __name__ == "__main__":
    sys.exit(main())
