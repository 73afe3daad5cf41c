"""Make the demo pair: `python -m training.train`.

Tokenizer, target, an early pair that others can already load, draft, measurements, card: in this order. Everything is
written to a work folder first and moved file by file, so a reader never sees half a file.
"""

import argparse
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rootward import demo
from training import card, corpus, excerpts, measure, models, tokenizer
from training.batches import Windows, fixed_windows, token_stream
from training.budget import Budget
from training.distill import PEAK, TOKENS_PER_STEP, MixedBatches, distill, draw_pool
from training.pretrain import pretrain
from training.progress import Progress

log = logging.getLogger("training.train")
POOL_SHARE = 0.2


class Data(NamedTuple):
    """What all phases share; `held_out` is `[B, L + 1]`, streams are token ids."""

    tokenizer: PreTrainedTokenizerFast
    training: list[corpus.SourceFile]
    held_out_files: list[corpus.SourceFile]
    stream: NDArray[Any]
    held_out_stream: NDArray[Any]
    held_out: torch.Tensor


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo.paths().target.parent, help="folder to publish to")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rootward-demo-train")
    parser.add_argument("--minutes-target", type=float, default=38.0)
    parser.add_argument("--minutes-draft", type=float, default=26.0)
    parser.add_argument("--minutes-early", type=float, default=2.0, help="distillation of the early draft")
    parser.add_argument("--early-at", type=float, default=0.25, help="at this part of the target's; > 1: none")
    parser.add_argument("--steps-target", type=int, default=None)
    parser.add_argument("--steps-draft", type=int, default=None)
    parser.add_argument(
        "--reuse-target", type=int, metavar="STEPS", help="take the work folder's target, trained so long"
    )
    parser.add_argument("--reuse-draft", type=int, metavar="STEPS", help="train the work folder's draft further")
    parser.add_argument("--compile", action="store_true", help="fuse with torch.compile; needs a C++ compiler")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def prepare() -> Data:
    """Read the corpus, learn the tokenizer and tokenise."""
    training, held_out_files = corpus.training_files(), corpus.held_out_files()
    learned = tokenizer.train(file.text for file in training)
    stream, held_out_stream = token_stream(learned, training), token_stream(learned, held_out_files)
    log.info("%d training tokens, %d held-out tokens", len(stream), len(held_out_stream))
    return Data(learned, training, held_out_files, stream, held_out_stream, fixed_windows(held_out_stream, 24, 512))


def publish(source: Path, out: Path) -> None:
    """Move copies of all files below `source` to the same places below `out`, each atomically."""
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        goal = out / path.relative_to(source)
        goal.parent.mkdir(parents=True, exist_ok=True)
        fresh = goal.with_name(goal.name + ".new")
        shutil.copyfile(path, fresh)
        os.replace(fresh, goal)


def make_early_pair(target: LlamaForCausalLM, data: Data, args: argparse.Namespace) -> None:
    """Publish the half-trained target with a quickly distilled draft."""
    folder = args.work / "early"
    models.save(target, data.tokenizer, folder / "target")
    draft = models.build(models.DRAFT_SHAPE)
    batches = MixedBatches(Windows(data.stream, args.seed + 3), None, args.seed)
    budget = Budget(args.minutes_early)
    distill(models.load(folder / "target"), draft, batches, data.held_out, budget, Progress("early draft"))
    models.save(draft, data.tokenizer, folder / "draft")
    excerpts.write(folder / "prompts.jsonl", data.held_out_files, data.tokenizer)
    publish(folder, args.out)
    log.info("early pair published")


def train_target(data: Data, args: argparse.Namespace, pair: Path) -> tuple[Progress, int]:
    """Train and save the target; returns its curve and its steps."""
    target = models.build(models.TARGET_SHAPE)
    budget, progress = Budget(args.minutes_target, args.steps_target), Progress("target")
    early_due = args.early_at <= 1

    def on_evaluation(model: LlamaForCausalLM) -> None:
        nonlocal early_due
        models.save(model, data.tokenizer, args.work / "checkpoint" / "target")
        if early_due and budget.progress() >= args.early_at:
            early_due = False
            make_early_pair(model, data, args)

    pretrain(target, Windows(data.stream, args.seed + 1), data.held_out, budget, progress, on_evaluation, args.compile)
    models.save(target, data.tokenizer, pair / "target")
    return progress, budget.steps_done


def train_draft(data: Data, args: argparse.Namespace, pair: Path) -> tuple[Progress, int, int]:
    """Train and save the draft; returns its curve, its steps and the number of rows the target drew for it."""
    target, draft, peak = models.load(pair / "target"), models.build(models.DRAFT_SHAPE), PEAK
    if args.reuse_draft is not None:
        draft, peak = models.load(pair / "draft").train().requires_grad_(True), PEAK / 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    drawing = Budget(args.minutes_draft * POOL_SHARE)
    pool = draw_pool(target, Windows(data.stream, args.seed + 4), drawing, threads)
    batches = MixedBatches(Windows(data.stream, args.seed + 2), pool, args.seed)
    budget, progress = Budget(args.minutes_draft * (1 - POOL_SHARE), args.steps_draft), Progress("draft")
    distill(target, draft, batches, data.held_out[::3], budget, progress, peak)
    torch.set_num_threads(threads)
    models.save(draft, data.tokenizer, pair / "draft")
    return progress, budget.steps_done + (args.reuse_draft or 0), len(pool)


def measurements(data: Data, pair: Path) -> dict[str, Any]:
    """The numbers of the saved pair, as the card and the tests use them."""
    target, draft = models.load(pair / "target"), models.load(pair / "draft")
    beginnings = fixed_windows(data.held_out_stream, 48, measure.PROMPT_LENGTH - 1)
    return {
        "target_parameters": models.num_parameters(target),
        "draft_parameters": models.num_parameters(draft),
        "target_layers": target.config.num_hidden_layers,
        "draft_layers": draft.config.num_hidden_layers,
        "target_hidden": target.config.hidden_size,
        "draft_hidden": draft.config.hidden_size,
        "target_loss": measure.held_out_loss(target, data.held_out),
        "draft_loss": measure.held_out_loss(draft, data.held_out),
        "acceptance_held_out": measure.acceptance(target, draft, data.held_out, measure.TEMPERATURES),
        "acceptance_own_text": measure.acceptance_on_own_text(target, draft, beginnings),
        "vocab": len(data.tokenizer),
        "chars_per_token": sum(len(f.text) for f in data.held_out_files) / len(data.held_out_stream),
        "num_training": len(data.training),
        "num_held_out": len(data.held_out_files),
        "held_out_percent": corpus.HELD_OUT_PERCENT,
        "python": platform.python_version(),
    }


def history(args: argparse.Namespace, pair: Path, minutes: float, pool_rows: int) -> dict[str, Any]:
    """Commands, minutes and drawn rows that led to this pair, those of the reused parts included."""
    kept = pair / "measured.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if args.reuse_target is not None and kept.exists() else {}
    rows_before = before.get("pool_rows", 0) if args.reuse_draft is not None else 0
    said = {name: value for name, value in vars(args).items() if name not in {"out", "work"} and value is not None}
    options = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in said.items()]
    command = " ".join(["python -m training.train", *(o for o in options if not o.endswith(" False"))])
    return {
        "commands": [*before.get("commands", []), command],
        "total_minutes": before.get("total_minutes", 0.0) + minutes,
        "pool_rows": rows_before + pool_rows,
    }


def main() -> None:
    """Run all phases."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    disable_progress_bar()
    args = arguments()
    began = time.monotonic()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    data, pair = prepare(), args.work / "pair"
    curves: list[Progress] = []
    steps = {"target_steps": args.reuse_target}
    if args.reuse_target is None:
        curve, steps["target_steps"] = train_target(data, args, pair)
        curves.append(curve)
    curve, steps["draft_steps"], pool_rows = train_draft(data, args, pair)
    curves.append(curve)
    measured = measurements(data, pair) | steps | {"step_tokens": TOKENS_PER_STEP, "seed": args.seed}
    measured |= history(args, pair, (time.monotonic() - began) / 60, pool_rows)
    card.write(pair, measured, curves)
    excerpts.write(pair / "prompts.jsonl", data.held_out_files, data.tokenizer)
    publish(pair, args.out)
    log.info("published to %s after %.1f minutes: %s", args.out.name, measured["total_minutes"], measured)


if __name__ == "__main__":
    main()
