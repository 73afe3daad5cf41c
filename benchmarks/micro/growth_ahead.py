"""What growing ahead is worth, over many rounds and any distance: drawn nodes, chosen guesses, guesses that share the bonus noise.

    python benchmarks/micro/growth_ahead.py [--noise 1.5] [--temperature 1] [--one-way-ms 20] [--verify-ms 30] [--level-ms 4]

One session at a time on the demo pair. The models compute; the clock does not: a target pass, a draft level and a way over the wire
take the times given, so that the figures are those of that distance and not of this machine. Growth and verification are the services'
own (`Grower`, `Runner`). `--enough`: a round is launched when so many nodes have arrived. Printed per form: tokens per round, share of
rounds that begin with kept nodes (hits), nodes kept then, nodes drawn per node verified, and tokens per second of that clock.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from drafter_service.growing import MAX_NODES, Grower
from rootward.bench.noisy import NoisyModel
from rootward.core.ahead import Bets
from rootward.core.frames import Commit, Grow, Open, extend_hash
from rootward.core.growth import Policy
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import Law, Rule, Sampling
from rootward.core.rng import Key, Role
from rootward.demo import paths, prompts
from rootward.engine.loading import load_model
from rootward.engine.tokenizers import load_tokenizer
from rootward.ports import LanguageModel
from verifier_service.runner import Chunk, Round, Runner


@dataclass(frozen=True)
class Times:
    level_s: float
    verify_s: float
    one_way_s: float
    patience_s: float


@dataclass(frozen=True)
class Form:
    """How a drafter goes on while its tree is verified."""

    name: str
    ahead: int = 0  # nodes of guesses
    drawn: int = 0  # nodes drawn beyond those that are verified
    shared: bool = False


@dataclass
class Counts:
    rounds: int = 0
    tokens: int = 0
    hits: int = 0
    kept: int = 0
    verified: int = 0
    grown: int = 0
    seconds: float = 0.0


class Drafter:
    """A `Grower` on a clock of its own, at the far end of a wire."""

    def __init__(self, grower: Grower[int], times: Times) -> None:
        self.grower, self.times, self.now_s = grower, times, 0.0
        self.commits: deque[tuple[float, Commit]] = deque()
        self.frames: deque[tuple[float, Grow]] = deque()

    def until(self, moment_s: float) -> None:
        """Go on until the clock has reached this moment."""
        while True:
            while self.commits and self.commits[0][0] <= self.now_s:
                self._send([x for x in self.grower.commit(1, self.commits.popleft()[1]) if isinstance(x, Grow)])
            if self.now_s >= moment_s:
                return
            if self.grower.idle:
                self.now_s = min(moment_s, self.commits[0][0] if self.commits else math.inf)
                continue
            self.now_s += self.times.level_s
            self._send([frame for _, frame in self.grower.level()])

    def _send(self, frames: Sequence[Grow]) -> None:
        self.frames += [(self.now_s + self.times.one_way_s, frame) for frame in frames]


def generate(
    runner: Runner,
    grower: Grower[int],
    prompt: list[int],
    form: Form,
    about: argparse.Namespace,
    times: Times,
    seed: int,
) -> Counts:
    """One session of `about.tokens` tokens."""
    sampling, key, cap = Sampling(about.temperature), Key(seed), about.nodes
    kv_slot, text, hash_ = runner.model.open(), list(prompt), 0
    for token in prompt:
        hash_ = extend_hash(hash_, token)
    runner.prefill([Chunk(kv_slot, tuple(prompt[:-1]))])
    message = Open(
        1, "s", 1, tuple(prompt), sampling, Law(about.law), key.derive(Role.DRAW), 0, 32, cap + form.drawn, 8, 4,
        ahead_cap=form.ahead, bonus_key=key.bonus().value if form.shared else None,
    )  # fmt: skip
    far = Drafter(grower, times)
    assert grower.open(1, message) is None
    tree = LivingTree(
        len(text), hash_, vocab_size=1 << 30, node_cap=cap + form.drawn, ahead_cap=form.ahead, max_atoms=64
    )
    counts, now_s, at_rest = Counts(), 0.0, False
    while len(text) - len(prompt) < about.tokens:
        begun_s = now_s
        while not (len(tree) >= about.enough or at_rest or now_s >= begun_s + times.patience_s):
            far.until(now_s)
            arrives_s = far.frames[0][0] if far.frames else math.inf
            if arrives_s > now_s:  # nothing has arrived: a level later there may be more under way
                far.until(min(arrives_s, far.now_s + times.level_s))
                now_s = min(far.frames[0][0] if far.frames else far.now_s, begun_s + times.patience_s)
                now_s = max(now_s, min(far.now_s, begun_s + times.patience_s)) if not far.frames else now_s
            while far.frames and far.frames[0][0] <= now_s:
                frame = far.frames.popleft()[1]
                tree.receive(frame)
                at_rest = frame.at_rest and frame.base_len == tree.length
        snapshot = tree.snapshot(cap)
        shared = form.shared and form.ahead > 0
        one = Round(kv_slot, text[-1], len(text), Rule.TRAVERSAL, sampling, key, 1, snapshot, shared=shared)
        (outcome,) = runner.verify([one])
        now_s += times.verify_s
        far.until(now_s)
        while far.frames and far.frames[0][0] <= now_s:
            tree.receive(far.frames.popleft()[1])
        far.commits.append(
            (now_s + times.one_way_s, Commit(1, tree.length, outcome.tokens, hash_of(tree, outcome.tokens)))
        )
        text += outcome.tokens
        tree.commit(outcome.tokens)
        at_rest = False
        counts.rounds += 1
        counts.tokens += len(outcome.tokens)
        counts.verified += outcome.num_nodes
        counts.hits += tree.root_id != ROOT
        counts.kept += len(tree)
    counts.grown, counts.seconds = grower.trees[1].tree.next_id - 1, now_s
    grower.close(1)
    runner.model.close(kv_slot)
    return counts


def hash_of(tree: LivingTree, tokens: Sequence[int]) -> int:
    value = tree.hash
    for token in tokens:
        value = extend_hash(value, token)
    return value


def models(about: argparse.Namespace) -> tuple[LanguageModel, LanguageModel]:
    pair = paths()
    target = load_model(str(pair.target), max_slots=1)
    draft: LanguageModel = load_model(str(pair.draft), max_slots=1)
    return target, NoisyModel(draft, about.noise, 1) if about.noise else draft


def main() -> None:
    about = _parser().parse_args()
    target, draft = models(about)
    tokenizer = load_tokenizer(str(paths().target))
    texts = [tokenizer.encode(text)[:64] for text in prompts()[: about.prompts]]
    times = Times(*(x / 1e3 for x in (about.level_ms, about.verify_ms, about.one_way_ms, about.patience_ms)))
    forms = [
        Form("none"),
        Form("drawn on", drawn=about.ahead),
        Form("chosen guesses", ahead=about.ahead),
        Form("shared bonus", ahead=about.ahead, shared=True),
    ]
    print(f"{'':16} tokens/round   hits  kept  grown/verified  tokens/s")
    for form in forms:
        total = Counts()
        for seed, text in enumerate(texts):
            policy = Policy(Law.SAMPLED, draws_per_level=about.draws)
            bets = Bets(share=about.share, draws_per_level=about.guess_draws)
            grower: Grower[int] = Grower(draft, incarnation=seed + 1, policy=policy, bets=bets)
            one = generate(Runner(target), grower, text, form, about, times, seed)
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(one, name))
        t = total
        print(
            f"{form.name:16} {t.tokens / t.rounds:10.3f} {t.hits / t.rounds:8.3f} {t.kept / t.rounds:5.1f} "
            f"{t.grown / max(t.verified, 1):10.2f} {t.tokens / t.seconds:14.1f}",
            flush=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {
        "temperature": 1.0, "noise": 0.0, "level_ms": 4.0, "verify_ms": 30.0, "one_way_ms": 20.0, "patience_ms": 200.0,
    }  # fmt: skip
    sizes = {
        "nodes": 16,
        "enough": 16,
        "ahead": 64,
        "share": 8,
        "draws": 4,
        "guess_draws": 2,
        "tokens": 128,
        "prompts": 16,
    }
    for name, value in {**numbers, **sizes}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    parser.add_argument("--law", choices=["sampled", "greedy"], default="sampled")
    parser.epilog = f"nodes + ahead: at most {MAX_NODES}"
    return parser


if __name__ == "__main__":
    main()
