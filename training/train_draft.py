"""Train a draft head for a target: `python -m training.train_draft TARGET --out FOLDER`, also as `rootward train-draft`.

Text that the target writes itself (chats); a head of one layer in the published format of EAGLE-3 (training);
simulated acceptance on chats that training never saw (report). Each phase goes on where an interrupted run stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import distributed
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rootward import demo
from rootward.engine.checkpoint import cpu_dtype, fingerprint
from rootward.errors import ConfigurationError, first_line
from training.budget import Budget, learning_rate
from training.chat_store import ChatStore, write_chunk
from training.chats import Chat, ChatSampler
from training.draft_head import DraftHead, head_config
from training.head_report import STEPS, acceptance, write_report
from training.muon import Muon
from training.overlap import overlap_loss
from training.progress import Progress
from training.warm_start import Sample, warm_start

Number = TypeVar("Number", int, float)

log = logging.getLogger("training.train_draft")
CHUNK_TOKENS = 25_000
HELD_OUT_SHARE = 0.04
STEP_DECAY = 0.8  # weight of an unrolled step relative to the one before
CHECKPOINT_S = 120.0
MEASURE_EVERY = 8  # of the chunks of rows of a step, where only the gradient is wanted
WARM_START_TOKENS = 60_000
WATCHED = 30  # held-out chats that are looked at while training


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of chats: whole chats are held out."""

    training: list[int]
    held_out: list[int]

    @classmethod
    def of(cls, store: ChatStore, seed: int) -> Split:
        """A split that stays the same when chats are added: a chat's own number decides."""
        held_out = [
            chat for chat in range(len(store)) if random.Random(f"{seed}/{store.key(chat)}").random() < HELD_OUT_SHARE
        ]
        kept = set(held_out)
        return cls([chat for chat in range(len(store)) if chat not in kept], held_out)


@dataclass(frozen=True, slots=True)
class Target:
    """The target, frozen, and the layers whose inputs the head reads. fingerprint: of its configuration and weights as they are stored."""

    model: Any
    tokenizer: Any
    layers: tuple[int, ...]
    device: torch.device
    fingerprint: str = ""

    @torch.no_grad()
    def run(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head reads and what it is compared with, in float32: inputs of the layers `[B, T, layers * hidden]`, and outputs of the
        final norm `[B, T, hidden]`. ids: `[B, T]`, padded at the end.
        """
        self.model.config._attn_implementation = "sdpa"  # sampling sets its own
        output = self.model.model(ids, use_cache=False, output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer] for layer in self.layers], -1)
        return states.float(), output.last_hidden_state.float()

    @property
    def embedding(self) -> torch.Tensor:
        """Input embeddings `[V, hidden]`."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def output(self) -> torch.Tensor:
        """Output matrix `[V, hidden]`."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Reads a number above 0 from a command line."""

    def read(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not number > 0:
            raise argparse.ArgumentTypeError(f"{text!r}: use {'a whole' if kind is int else 'a'} number above 0")
        return number

    return read


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line (None: that of the process)."""
    count, amount = positive(int), positive(float)
    parser = argparse.ArgumentParser(
        prog="rootward train-draft", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "target",
        type=lambda name: Path(demo.target_named(name)),
        help="folder of the target (Hugging Face format), or demo: the shipped one",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--work", type=Path, default=None, help="folder of text and checkpoints; default OUT/work")
    parser.add_argument("--tokens", type=count, default=1_000_000, help="tokens of text to sample")
    parser.add_argument(
        "--sampling-minutes", type=amount, default=math.inf, help="end sampling after this time instead"
    )
    parser.add_argument(
        "--answer-tokens",
        type=count,
        default=300,
        help="longest answer; shorter ones are sampled faster, and more of them",
    )
    parser.add_argument("--slots", type=count, default=96, help="chats sampled at a time")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=None,
        help='JSON lines {"text": user turn} to answer first; then the target goes on with turns that begin like these',
    )
    parser.add_argument(
        "--from-head",
        type=Path,
        default=None,
        help="folder of a head of this command to go on from, with its draft vocabulary, at all unrolled steps; default: least squares",
    )
    parser.add_argument("--epochs", type=amount, default=4.0, help="passes over the text")
    parser.add_argument("--minutes", type=amount, default=None, help="end training after this time instead")
    parser.add_argument("--batch-tokens", type=count, default=3000, help="tokens of a step, of whole chats")
    parser.add_argument("--learning-rate", type=amount, default=2e-3, help="the largest of the schedule")
    parser.add_argument("--unrolled", type=count, default=4, help="steps that the last part of training unrolls")
    parser.add_argument(
        "--tv",
        type=float,
        default=0.0,
        help="weight of the total variation distance 1 - sum min(p, q), the probability that a draft token is rejected, beside KL",
    )
    parser.add_argument(
        "--draft-vocabulary", type=count, default=8192, help="tokens that the head can propose, the most frequent ones"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", default=None, help="layers whose inputs the head reads; default 2, N/2, N-3"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--threads", type=count, default=None, help="CPU threads; default: all cores")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, the answers, the split and the training")
    return parser.parse_args(argv)


def read_turns(path: Path) -> list[str]:
    """The user turns of a file of JSON lines. ConfigurationError if there is none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts: '{path}' cannot be read ({error}); name a readable file") from None
    turns = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turn = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            turn = None
        if not isinstance(turn, str):
            raise ConfigurationError(f'--prompts: line {number} of \'{path}\' is not such as {{"text": "a question"}}')
        turns.append(turn)
    if not turns:
        raise ConfigurationError(f"--prompts: '{path}' is empty; give lines of JSON, or leave it out")
    return turns


def load_target(args: argparse.Namespace) -> Target:
    """The target's weights as they are stored; on processors without fast bfloat16 computed in float32. ConfigurationError for a model
    that cannot write chats, and for layers that it does not have."""
    try:
        # transformers would take it for the name of a repository
        if args.target.is_absolute() and not args.target.is_dir():
            raise OSError("there is no such folder")
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        fix = "name a folder that save_pretrained wrote"
        raise ConfigurationError(f"target: '{args.target}' cannot be loaded ({first_line(error)}); {fix}") from None
    if not tokenizer.chat_template:
        raise ConfigurationError(f"target: '{args.target}' has no chat template; name an instruct model, which answers")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigurationError(f"--device: {args.device!r}, but torch finds no CUDA device; use cpu")
    identity = fingerprint(model)  # before its type is that of the device
    model = model.to(args.device).eval().requires_grad_(False)
    if args.device == "cpu" and cpu_dtype(str(args.target))[0] == "float32":
        model = model.float()
    count = model.config.num_hidden_layers
    layers = tuple(args.layers or (2, count // 2, count - 3))
    if not all(0 <= layer < count for layer in layers):
        raise ConfigurationError(f"--layers: {' '.join(map(str, layers))}: use numbers from 0 to {count - 1}")
    return Target(model, tokenizer, layers, torch.device(args.device), identity)


def sample(
    target: Target, folder: Path, args: argparse.Namespace, *, prompts: list[str] | None, num_tokens: float = math.inf
) -> None:
    """Fill `folder` with chunks of chats until so many tokens are there; without a number, until every prompt is answered."""
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / "finished"
    store = ChatStore(folder)
    present = store.num_tokens
    if finished.exists() or present >= num_tokens:
        return
    chunks = sorted(folder.glob("*.safetensors"))
    answers_only = num_tokens == math.inf
    slots = min(args.slots, 2 * len(prompts)) if prompts and answers_only else args.slots
    seed = args.seed + 1000 * len(chunks)  # another text than that of the run before
    sampler = ChatSampler(
        target.model,
        target.tokenizer,
        num_slots=slots,
        seed=seed,
        prompts=prompts,
        answers_only=answers_only,
        max_answer=args.answer_tokens,
        answered=store,
    )
    # Time after the last chunk does not count, as its chats are lost.
    spent = folder / "seconds"
    seconds_done = float(spent.read_text(encoding="utf-8")) if spent.exists() else 0.0
    progress, budget = Progress(folder.name), Budget(args.sampling_minutes, seconds_done=seconds_done)
    waiting: list[Chat] = []

    def flush() -> None:
        write_chunk(folder / f"chats-{seed}-{present}.safetensors", waiting)
        spent.with_suffix(".new").write_text(str(budget.elapsed_s()), encoding="utf-8")
        spent.with_suffix(".new").replace(spent)
        waiting.clear()

    for ended in sampler.chats():
        waiting += ended
        fresh = sum(len(chat.ids) for chat in waiting)
        share = sampler.progress if answers_only else max(budget.progress(), (present + fresh) / num_tokens)
        done = share >= 1
        progress.step(min(1.0, share))
        if fresh >= CHUNK_TOKENS or (waiting and done):
            flush()
            present += fresh
        if done:
            break
    if waiting:
        flush()
    if answers_only or budget.progress() >= 1:  # otherwise the number of tokens tells; a larger one adds text
        finished.touch()
    progress.close()


def check_text(args: argparse.Namespace, target: Target, given: list[str] | None) -> None:
    """Note what the text of the work folder is made of. ConfigurationError if the text there is of another target or other prompts."""
    made_of = {
        "target": target.fingerprint,
        "prompts": hashlib.sha256(json.dumps(given).encode()).hexdigest() if given else "",
    }
    file = args.work / "made_of.json"
    if not file.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".new").write_text(json.dumps(made_of), encoding="utf-8")
        file.with_suffix(".new").replace(file)
        return
    had = json.loads(file.read_text(encoding="utf-8"))
    for name, flag, value in (("target", "target", args.target), ("prompts", "--prompts", args.prompts)):
        if had[name] != made_of[name]:
            fix = f"use those, or another --work than '{args.work}', which has the text"
            raise ConfigurationError(f"{flag}: '{value}', but the text that is used here was made with others; {fix}")


def draft_vocabulary(store: ChatStore, chats: list[int], size: int, vocabulary: int) -> torch.Tensor:
    """The tokens that answers use most, ascending."""
    counts = store.token_counts(chats, vocabulary)
    ranked = counts - torch.arange(vocabulary).double() / vocabulary  # ties: the smaller id first
    kept = ranked.topk(min(size, vocabulary)).indices.sort().values
    covered = 100 * counts[kept].sum() / counts.sum()
    log.info("%d of %d tokens cover %.2f %% of the text", len(kept), vocabulary, covered)
    return kept


def initialise(head: DraftHead, target: Target, store: ChatStore, split: Split, args: argparse.Namespace) -> None:
    """Weights by least squares on a part of the text."""
    norm = target.model.model.norm.weight.float()

    def samples() -> Iterator[Sample]:
        positions = 0
        for chats in store.batches(split.training, args.batch_tokens, random.Random(args.seed)):
            batch = store.batch(chats, users=True)
            ids, wanted = batch.ids.to(target.device), batch.wanted.to(target.device)
            states, final = target.run(ids)
            embeddings = functional.embedding(ids.roll(-1, 1), target.embedding).float()
            yield Sample(states, embeddings, wanted, final.roll(-1, 1)[wanted] / norm)
            positions += len(chats) * ids.shape[1]
            if positions > WARM_START_TOKENS:
                return

    warm_start(head, samples, norm=norm, num_steps=min(3, args.unrolled))


def load_head(folder: Path, hidden_size: int) -> DraftHead:
    """The head to go on from; ConfigurationError if it cannot be one."""
    try:
        head = DraftHead.load(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(
            f"--from-head: {folder} has no head that train-draft wrote ({first_line(error)})"
        ) from None
    if head.config["target_hidden_size"] != hidden_size:
        raise ConfigurationError(
            f"--from-head: this head is for targets of hidden size {head.config['target_hidden_size']}, this one has {hidden_size}"
        )
    return head


@torch.no_grad()
def rescale(head: DraftHead, target: Target, store: ChatStore, split: Split, args: argparse.Namespace) -> None:
    """Take the sizes of the states' components out of fc again, of which the file holds the product: updates treat columns alike."""
    batch = store.batch(next(store.batches(split.training, args.batch_tokens, random.Random(args.seed))), users=True)
    states, _ = target.run(batch.ids.to(target.device))
    scale = states[batch.wanted.to(target.device)].pow(2).mean(0).sqrt().clamp(min=1e-6)
    head.fc.weight.mul_(scale)
    head.scale.copy_(scale)


def loss_of(
    head: DraftHead,
    target: Target,
    store: ChatStore,
    chats: list[int],
    *,
    num_steps: int,
    users: bool,
    tv: float = 0.0,
    measure_every: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, means `[steps, 3]`) of `overlap_loss` on these chats. users: positions of the user's turn count too, which the target wrote
    but for given first words.
    """
    batch = store.batch(chats, users=users)
    ids, wanted = batch.ids.to(target.device), batch.wanted.to(target.device)
    states, final = target.run(ids)
    embeddings = functional.embedding(ids.roll(-1, 1), target.embedding).float()
    following = final.roll(-1, 1).flatten(0, 1)[wanted.flatten()]
    outputs = torch.stack(list(head.unroll(states, embeddings, wanted, num_steps)))
    rank = (wanted.long().cumsum(1) - 1)[wanted]
    steps = torch.arange(num_steps, device=target.device)[:, None]
    weights = (rank[None] >= steps) * STEP_DECAY**steps / len(rank)
    output_rows = target.output[head.draft_ids]
    if target.device.type == "cuda":
        output_rows = output_rows.float()  # logits of TF32, which bfloat16 would round to 8 bits
    return overlap_loss(outputs, following, output_rows, weights=weights, tv=tv, measure_every=measure_every)


def unrolled_steps(progress: float, most: int) -> int:
    """One step first, which costs least and teaches most, then more."""
    return 1 if progress < 0.25 else min(2, most) if progress < 0.5 else most


class Workers:
    """Processes that train one head on different batches, started by `torchrun --nproc-per-node N -m training.train_draft`; else one."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.count > 1:
            distributed.init_process_group("gloo", timeout=timedelta(days=1))

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()

    def first(self, value: float) -> float:
        """The value of the first process, for all."""
        if self.count == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        distributed.broadcast(shared, 0)
        return shared.item()

    def mean(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace tensors by their means over the processes."""
        if self.count > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor.div_(self.count))


@dataclass(slots=True)
class Run:
    """State of a training run that a checkpoint keeps."""

    head: DraftHead
    optimizer: Muon
    progress: Progress
    seconds: float = 0.0
    steps: int = 0
    visited: int = 0  # positions

    def save(self, path: Path) -> None:
        """Write the checkpoint, complete or not at all."""
        state = {
            "head": self.head.state_dict(),
            "draft_ids": self.head.draft_ids,
            "optimizer": self.optimizer.state_dict(),
            "curves": [self.progress.training, self.progress.held_out],
            "counts": [self.seconds, self.steps, self.visited],
            "layers": list(self.head.config["eagle_aux_hidden_state_layer_ids"]),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.seconds, self.steps, self.visited = state["counts"]
        self.progress.resume(self.steps, *state["curves"])


def train(
    run: Run, target: Target, store: ChatStore, split: Split, *, args: argparse.Namespace, workers: Workers
) -> None:
    """Train the head in place until the budget is spent."""
    if target.model.dtype == torch.bfloat16:
        torch.set_float32_matmul_precision("medium")  # the head's float32 matrices too: bfloat16 on CPUs, TF32 on GPUs
    head, progress, checkpoint = run.head, run.progress, args.work / "checkpoint.pt"
    epoch_steps = len(list(store.batches(split.training, args.batch_tokens, random.Random(0)))) // workers.count
    if not epoch_steps:  # no process would ever get a batch
        fix = "raise it, or lower --batch-tokens"
        raise ConfigurationError(
            f"--tokens: the text has fewer batches than there are processes, {workers.count}; {fix}"
        )
    total = None if args.minutes else max(1, int(args.epochs * epoch_steps))
    budget = Budget(args.minutes or math.inf, total, seconds_done=run.seconds, steps_done=run.steps)
    with torch.no_grad():
        workers.mean([*head.parameters(), head.scale])  # the same bits for all
    saved = time.monotonic()
    for chats in _endless(store, split.training, seed=f"{args.seed}/{run.steps}", args=args, workers=workers):
        done = workers.first(budget.progress())
        if done >= 1:
            break
        steps = args.unrolled if args.from_head else unrolled_steps(done, args.unrolled)
        loss, means = loss_of(
            head, target, store, chats, num_steps=steps, users=True, tv=args.tv, measure_every=MEASURE_EVERY
        )
        loss.backward()
        workers.mean(parameter.grad for parameter in head.parameters())
        run.optimizer.step(learning_rate(args.learning_rate, done))
        budget.steps_done += 1
        run.visited += workers.count * sum(store.length(chat) for chat in chats)
        progress.step(done, means[0, 0].item())
        if workers.rank == 0 and time.monotonic() - saved > CHECKPOINT_S:
            saved = time.monotonic()
            if split.held_out:  # of a small text none may be
                with torch.no_grad():
                    held_out = loss_of(head, target, store, split.held_out[:WATCHED], num_steps=1, users=False)[1]
                progress.evaluated(budget.steps_done, held_out[0, 0].item())
            run.seconds, run.steps = budget.elapsed_s(), budget.steps_done
            run.save(checkpoint)
            head.save(args.out, target.model.config.vocab_size)
    progress.close()
    if workers.rank == 0:
        run.seconds, run.steps = budget.elapsed_s(), budget.steps_done
        run.save(checkpoint)
        head.save(args.out, target.model.config.vocab_size)


def _endless(
    store: ChatStore, chats: list[int], *, seed: str, args: argparse.Namespace, workers: Workers
) -> Iterator[list[int]]:
    """Batches of this process, epoch after epoch."""
    for epoch in itertools.count():
        groups = list(store.batches(chats, args.batch_tokens, random.Random(f"{seed}/{epoch}")))
        yield from groups[workers.rank : len(groups) // workers.count * workers.count : workers.count]


def check_resumed(state: dict[str, Any], args: argparse.Namespace, target: Target) -> None:
    """ConfigurationError if a checkpoint is of a head of another form than the command line asks for."""
    fix = f"use that, or another --work than '{args.work}', which has the checkpoint"
    layers = tuple(state.get("layers", target.layers))  # checkpoints of earlier versions do not tell
    if layers != target.layers:
        asked, had = (" ".join(map(str, some)) for some in (target.layers, layers))
        raise ConfigurationError(f"--layers: {asked}, but the run that goes on here has {had}; {fix}")
    vocabulary = min(args.draft_vocabulary, target.model.config.vocab_size)
    if not args.from_head and vocabulary != len(state["draft_ids"]):
        had = str(len(state["draft_ids"]))
        raise ConfigurationError(f"--draft-vocabulary: {vocabulary}, but the run that goes on here has {had}; {fix}")


INTERRUPTED = 130  # exit code, as of a shell


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 with a head, 2 for wrong options. Errors are one line on stderr."""
    args = arguments(argv)
    try:
        run_phases(args)
    except ConfigurationError as error:
        print(f"rootward train-draft: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nrootward train-draft: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    return 0


def run_phases(args: argparse.Namespace) -> None:
    """Text, training, report."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    disable_progress_bar()
    args.work = args.work or args.out / "work"
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    given = read_turns(args.prompts) if args.prompts else None
    target = load_target(args)
    config = target.model.config
    # What does not fit is refused before sampling, which can take hours.
    head = load_head(args.from_head, config.hidden_size) if args.from_head else None
    if head and tuple(head.config["eagle_aux_hidden_state_layer_ids"]) != target.layers:
        raise ConfigurationError(
            f"--from-head: this head reads layers {head.config['eagle_aux_hidden_state_layer_ids']}; name them by --layers"
        )
    workers = Workers()
    if workers.rank == 0:
        check_text(args, target, given)
    checkpoint = args.work / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True, map_location="cpu") if checkpoint.exists() else None
    if state:
        check_resumed(state, args, target)
    if workers.rank == 0:
        sample(target, args.work / "text", args, prompts=given, num_tokens=args.tokens)
        sample(target, args.work / "prompts", args, prompts=demo.chats())
    workers.wait()
    store = ChatStore(args.work / "text")
    split = Split.of(store, args.seed)
    if not split.training:
        raise ConfigurationError(f"--tokens: {args.tokens} are too few, no chat is left for training; raise it")
    if head is None:
        ids = (
            state["draft_ids"]
            if state
            else draft_vocabulary(store, split.training, args.draft_vocabulary, config.vocab_size)
        )
        head = DraftHead(head_config(config, len(ids), target.layers), ids)
    head = head.to(target.device)
    run = Run(head, Muon(head.parameters()), Progress("head"))
    if state:
        run.load(state)
    elif args.from_head:
        rescale(head, target, store, split, args)
    else:
        initialise(head, target, store, split, args)
    train(run, target, store, split, args=args, workers=workers)
    if workers.rank:
        return
    prompts = ChatStore(args.work / "prompts")
    measured = {
        "target": args.target.name,
        "layers": list(target.layers),
        "parameters": sum(p.numel() for p in head.parameters()),
        "vocabulary": len(head.draft_ids),
        "command": command(workers),
        "training_tokens": store.num_tokens,
        "training_chats": len(split.training),
        "held_out_chats": len(split.held_out),
        "prompt_chats": len(prompts),
        "steps": run.steps,
        "visited_tokens": run.visited,
        "start": "of another head" if args.from_head else "by least squares",
        "loss": "KL(target || draft)" + (f" + {args.tv:g} (1 - sum min(target, draft))" if args.tv else ""),
        "unrolled": args.unrolled if args.from_head else f"1, 2, then {args.unrolled}",
        "processor": torch.cuda.get_device_name() if args.device == "cuda" else processor_name(),
        "held_out": acceptance(
            head, partial(loss_of, head, target, store, num_steps=STEPS, users=False), store, split.held_out
        ),
        "prompts": acceptance(
            head,
            partial(loss_of, head, target, prompts, num_steps=STEPS, users=False),
            prompts,
            list(range(len(prompts))),
        ),
    }
    write_report(args.out, measured, run.progress)


def command(workers: Workers) -> str:
    """The command line, absolute folders by their names."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    start = (
        "rootward train-draft"
        if workers.count == 1
        else f"torchrun --nproc-per-node {workers.count} -m training.train_draft"
    )
    return " ".join([start, *words])


def processor_name() -> str:
    """The model name of the processor, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    sys.exit(main())
