"""What growing ahead is worth at any distance, on a clock that only counts: waiting for each tree against the living tree.

    python benchmarks/micro/growth_ahead.py [--noise 0.6] [--rtts 0 20] [--verify-ms 60] [--level-ms 4] [--bet-ms 8] [--demo]

One session at a time. The models compute; the clock does not: a target pass, a draft level and a way over the wire take the times given,
so the figures are those of that distance and not of this machine or its load. Growth, verification and the launch rule are the services'
own (`Grower`, `Runner`, `launch_s`). Two forms for each kind of tree: *waits* has every round wait for its whole tree and grows nothing
ahead; *lives* grows ahead and launches by the rule.

Printed: tokens per second of that clock, tokens per round, share of rounds that begin with kept nodes (hits), and for rounds after a hit
and after a miss apart: nodes verified, tokens, milliseconds.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafter_service.__main__ import LEAST_LEVELS
from drafter_service.growing import MAX_NODES, Grower
from rootward.core.ahead import Bets
from rootward.core.frames import Commit, Grow, Open, extend_hash
from rootward.core.growth import Policy
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import DraftMode, Rule, Sampling
from rootward.core.rng import Key, Role
from rootward.demo import paths, prompts
from rootward.engine.loading import load_model
from rootward.engine.tabular import TabularModel
from rootward.engine.tokenizers import load_tokenizer
from rootward.ports import LanguageModel
from verifier_service.launching import launch_s
from verifier_service.runner import Chunk, Round, Runner
from verifier_service.worth import Worth


@dataclass(frozen=True)
class Times:
    level_s: float
    bet_s: float  # a level of growth ahead, which has more rows
    verify_s: float
    one_way_s: float


@dataclass(frozen=True)
class Form:
    name: str
    law: DraftMode
    lives: bool

    @property
    def rule(self) -> Rule:
        return Rule.TRAVERSAL if self.law.ratio else Rule.MATCH


@dataclass
class Tally:
    rounds: int = 0
    nodes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        n = max(self.rounds, 1)
        return f"{self.nodes / n:5.1f} {self.tokens / n:5.2f} {1e3 * self.seconds / n:6.1f}"


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
            bets = any(tree.betting for tree in self.grower.trees.values())
            self.now_s += self.times.bet_s if bets else self.times.level_s
            self._send([frame for _, frame in self.grower.level()])

    def next_s(self, before_s: float) -> float:
        """When the next frame arrives, if that is before a moment."""
        while not self.frames and self.now_s + self.times.one_way_s < before_s:
            self.until(self.now_s + self.times.level_s)
        return self.frames[0][0] if self.frames else math.inf

    def _send(self, frames: Sequence[Grow]) -> None:
        self.frames += [(self.now_s + self.times.one_way_s, frame) for frame in frames]


@dataclass
class Session:
    """A verifier's side of one generation. Times are on the clock that only counts."""

    runner: Runner
    far: Drafter
    text: list[int]
    form: Form
    about: argparse.Namespace
    key: Key
    worth: Worth
    tree: LivingTree = field(init=False)
    now_s: float = 0.0
    begun_s: float = 0.0  # last commit
    grown_s: float = 0.0  # last growth
    goes_on: bool = False  # below the present root
    at_rest: bool = False

    def open(self) -> None:
        about, form, times = self.about, self.form, self.far.times
        self.kv_slot, hash_ = self.runner.model.open(), 0
        for token in self.text:
            hash_ = extend_hash(hash_, token)
        self.runner.prefill([Chunk(self.kv_slot, tuple(self.text[:-1]))])
        seed = self.key.seed if form.law is DraftMode.COUPLED else self.key.derive(Role.DRAW)
        ahead = about.ahead if form.lives else 0
        self.shared = form.law.ratio and ahead > 0
        message = Open(
            1, "s", 1, tuple(self.text), Sampling(about.temperature), form.law, seed, 0, 32, about.nodes, 8, 4,
            ahead_cap=ahead, bonus_key=self.key.bonus().value if self.shared else None,
        )  # fmt: skip
        assert self.far.grower.open(1, message) is None
        cap, ahead = message.caps
        self.tree = LivingTree(len(self.text), hash_, vocab_size=1 << 30, node_cap=cap, ahead_cap=ahead, max_atoms=64)
        self.first_s = 2 * times.one_way_s + times.level_s

    def wait(self) -> None:
        """Until the round is launched."""
        while len(self.tree) < self.about.nodes and not self.at_rest:
            launch_s = math.inf if not self.form.lives else self.begun_s + self.patience_s()
            if self.now_s >= launch_s:
                return
            arrives_s = self.far.next_s(launch_s)
            if arrives_s > launch_s:
                self.now_s = launch_s
                return
            self.now_s = max(self.now_s, arrives_s)
            self.receive()

    def patience_s(self) -> float:
        kept = 0 if self.goes_on else min(len(self.tree), self.about.nodes)
        since_s = max(0.0, self.grown_s - self.begun_s) if kept else 0.0
        tokens, node_s = self.worth.tokens(self.about.nodes), self.far.times.level_s / 3
        due = {"verify_s": self.far.times.verify_s, "next_s": self.first_s, "node_s": node_s}
        return launch_s(kept, since_s, tokens=tokens, **due)

    def receive(self) -> None:
        self.far.until(self.now_s)
        while self.far.frames and self.far.frames[0][0] <= self.now_s:
            frame, before = self.far.frames.popleft()[1], len(self.tree)
            self.tree.receive(frame)
            current = frame.base_len == self.tree.length
            if len(self.tree) > before:
                self.grown_s, self.goes_on = self.now_s, self.goes_on or current
            self.at_rest = frame.at_rest and current

    def round(self) -> Tally:
        """One round, told about; the drafter hears of it."""
        cap, hit, begun_s = self.about.nodes, self.tree.root_id != ROOT, self.begun_s
        self.wait()
        snapshot, sampling = self.tree.snapshot(cap), Sampling(self.about.temperature)
        nodes, whole = len(snapshot.ids) - 1, self.goes_on or not hit
        about = self.form.rule, sampling, self.key, 1, snapshot
        (outcome,) = self.runner.verify(
            [Round(self.kv_slot, self.text[-1], len(self.text), *about, shared=self.shared)]
        )
        self.now_s += self.far.times.verify_s
        self.receive()
        self.worth.add(cap if whole else nodes, outcome.path)
        base, hash_ = self.tree.length, self.tree.hash
        for token in outcome.tokens:
            hash_ = extend_hash(hash_, token)
        self.text += outcome.tokens
        self.tree.commit(outcome.tokens)
        self.begun_s = self.grown_s = self.now_s
        self.goes_on = self.at_rest = False
        kept = min(len(self.tree), cap)
        budget = kept if self.form.lives and kept and self.patience_s() <= 0.0 else cap
        arrives_s = self.now_s + self.far.times.one_way_s
        self.far.commits.append((arrives_s, Commit(1, base, outcome.tokens, hash_, node_budget=budget)))
        return Tally(1, nodes, len(outcome.tokens), self.now_s - begun_s)

    def close(self) -> None:
        self.far.grower.close(1)
        self.runner.model.close(self.kv_slot)


def measured(form: Form, rtt_ms: float, about: argparse.Namespace) -> str:
    """A line of the table."""
    times = Times(about.level_ms / 1e3, (about.bet_ms or about.level_ms) / 1e3, about.verify_ms / 1e3, rtt_ms / 2e3)
    policy = Policy(DraftMode.SAMPLED, least_levels=LEAST_LEVELS)
    bets = Bets(share=about.share, draws_per_level=about.guess_draws)
    target, draft, texts = pair(about)
    tallies, worth = {True: Tally(), False: Tally()}, Worth()
    for seed, text in enumerate(texts):
        grower: Grower[int] = Grower(draft, incarnation=seed + 1, policy=policy, bets=bets)
        session = Session(Runner(target), Drafter(grower, times), list(text), form, about, Key(seed), worth)
        session.open()
        while len(session.text) - len(text) < about.tokens:
            tally = tallies[session.tree.root_id != ROOT]
            one = session.round()
            for name in vars(tally):
                setattr(tally, name, getattr(tally, name) + getattr(one, name))
        session.close()
    hit, miss = tallies[True], tallies[False]
    rounds, tokens, seconds = (getattr(hit, n) + getattr(miss, n) for n in ("rounds", "tokens", "seconds"))
    numbers = f"{rtt_ms:6g} {tokens / seconds:9.1f} {tokens / rounds:12.2f} {hit.rounds / rounds:6.2f}"
    return f"{form.name:18} {numbers}   {hit}   {miss}"


def pair(about: argparse.Namespace) -> tuple[LanguageModel, LanguageModel, list[tuple[int, ...]]]:
    """Target, draft and the texts to go on from."""
    if not about.demo:
        target = TabularModel(2048, 1, 1, sharpness=3, max_slots=1)
        return target, TabularModel.perturbed(target, about.noise, 2), [(1, 2, 3)] * about.prompts
    tokenizer, demo = load_tokenizer(str(paths().target)), paths()
    texts = [tuple(tokenizer.encode(text)[:64]) for text in prompts()[: about.prompts]]
    return load_model(str(demo.target), max_slots=1), load_model(str(demo.draft), max_slots=1), texts


def main() -> None:
    about = _parser().parse_args()
    print(f"{'':18} {'rtt':>6} tokens/s tokens/round   hits   after a hit: nodes, tokens, ms   after a miss")
    for law in (DraftMode.SAMPLED, DraftMode.COUPLED):
        for lives in (False, True):
            form = Form(f"{law.value} {'lives' if lives else 'waits'}", law, lives)
            for rtt_ms in about.rtts:
                print(measured(form, rtt_ms, about), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What growing ahead is worth, on a clock that only counts.")
    numbers = {"noise": 0.6, "temperature": 1.0, "verify_ms": 60.0, "level_ms": 4.0, "bet_ms": 0.0}
    sizes = {"nodes": 16, "ahead": 192, "share": 8, "guess_draws": 2, "tokens": 250, "prompts": 3}
    for name, value in {**numbers, **sizes}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    parser.add_argument("--rtts", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--demo", action="store_true", help="the demo pair instead of tables")
    parser.epilog = f"nodes + ahead: at most {MAX_NODES}"
    return parser


if __name__ == "__main__":
    main()
