"""One generation inside the verifier: committed tokens, its tree, its counts.

A session is a state machine (`TRANSITIONS`) without I/O. Each part has one writer, and all of them run in the engine loop, between steps:
text, KV, state and output the methods of `Session`; `draft` and `next_draft` the `DrafterPool`; `local_drafts` the
`LocalDrafts`; `round` the `Rounds`; `features` the `EngineLoop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

from rootward.core.frames import Open, extend_hash, prefix_hash
from rootward.core.living_tree import LivingTree
from rootward.core.pairing import check_rule
from rootward.core.requests import (
    BEST_FIRST,
    MAX_BRANCHING,
    Committed,
    DraftMode,
    DraftStrategy,
    Finish,
    FinishReason,
    Prefilled,
    Rule,
    Speculation,
    SpeculationMode,
    SpeculationStats,
    TokenLogprob,
    VerifiedTree,
    VerifierRequest,
)
from rootward.core.rng import Key, Role
from rootward.core.tree import TokenTree
from rootward.engine.grammar import TreeMatcher
from rootward.engine.processors import History, Prefix
from rootward.errors import DeadlineExceeded, InvalidRequest, NotFound, ServiceError
from rootward.tracing import INVALID_SPAN, Span
from verifier_service.settings import Shape
from verifier_service.speculation import Statistics

if TYPE_CHECKING:
    from verifier_service.drafter_link import Link
    from verifier_service.head_drafts import TextFeatures
    from verifier_service.local_drafts import LocalDraft

CHAIN_LENGTH, COPIES = 4, (2, 2, 2)  # shapes of the trees for a rule that verifies only chains, or only copies


class State(Enum):
    """State of a session. `prefill_left` tells whether a running one reads its prompt, `round.max_nodes` whether its round has begun."""

    QUEUED = "queued"  # no KV slot: the session is new, or was preempted
    RUNNING = "running"
    IN_STEP = "in step"  # the model computes its round
    FINISHED = "finished"  # nothing more is emitted; what it holds is freed between steps


class Event(Enum):
    ADMIT = "admit"  # it gets a KV slot
    PREEMPT = "preempt"  # its KV is given to others; round, tree and drafter stay (docs/decisions/0005)
    LAUNCH = "launch"
    COMMIT = "commit"
    FINISH = "finish"


TRANSITIONS = {
    (State.QUEUED, Event.ADMIT): State.RUNNING,
    (State.RUNNING, Event.PREEMPT): State.QUEUED,
    (State.RUNNING, Event.LAUNCH): State.IN_STEP,
    (State.IN_STEP, Event.COMMIT): State.RUNNING,
    (State.QUEUED, Event.FINISH): State.FINISHED,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.IN_STEP, Event.FINISH): State.FINISHED,
}


@dataclass(slots=True, eq=False)
class Draft:
    """The session's tree at a drafter.

    link                 the stream to the drafter
    closed               the drafter is gone. The nodes that have arrived are verified once, because to drop them now would depend on
                         their values; then the draft is dropped
    shared               the drafter predicts the bonus token of each round, whose noise it is told once the round runs
    pool                 of the drafter when the tree was opened: it may name another one when it comes back
    at_rest              the drafter sends no more nodes before the next commit
    has_growth           growth has arrived; before, the drafter reads the prompt and no round waits
    refused              for good: the context or the vocabulary of the drafter does not fit
    unanswered_since_s   on the `stall_clock` of the link: time of the oldest message that growth must answer; None: none
    misses               rounds without this tree since that time
    empty_rounds         rounds since the last one with nodes of it that found it at rest without a node
    wanted               nodes that the drafter was asked for; 0: as many as the tree was opened with
    rerooted_s           time of the last commit
    last_growth_s        time of the last growth that a round could verify
    has_current_growth   growth below the present root has arrived
    queued_s             time that the growth of this round waited in the drafter's queue
    """

    link: Link
    slot: int
    tree: LivingTree
    shared: bool = False
    pool: str = ""
    closed: bool = False
    at_rest: bool = False
    has_growth: bool = False
    refused: bool = False
    opened_s: float = 0.0
    unanswered_since_s: float | None = None
    misses: int = 0
    empty_rounds: int = 0
    wanted: int = 0
    rerooted_s: float = 0.0
    last_growth_s: float = 0.0
    has_current_growth: bool = False
    queued_s: float = 0.0


@dataclass(slots=True)
class PresentRound:
    """The present round of a session, from the commit before it to its own. Times are on the monotonic clock.

    max_nodes           most nodes that it verifies, fixed when it begins; None: no round has begun
    target_nodes        nodes that it waits for
    observed_nodes      nodes of which the verdict tells whether they are accepted
    launch_immediately  with the nodes that the last commit kept
    missed              it was launched without a node of its drafter, though it might have had some
    stalled             it is missed, and had waited for its drafter
    empty               it was launched without a node of its drafter, which had none to send
    had_prefill         a prefill ran during this round
    committed_s         time of the last commit
    launched_s          time of the launch after it
    idle_mark_s         idle time of the engine, in all, at the last commit
    tree_ready_at       the same when the tree had its nodes; from then on it waits for other sessions
    """

    max_nodes: int | None = None
    target_nodes: int = 0
    observed_nodes: int = 0
    launch_immediately: bool = False
    missed: bool = False
    stalled: bool = False
    empty: bool = False
    had_prefill: bool = False
    committed_s: float = 0.0
    launched_s: float = 0.0
    idle_mark_s: float = 0.0
    tree_ready_at: float | None = None


@dataclass(slots=True, eq=False)
class Session:
    """A generation on this verifier: its text, its KV, its drafts and its present round.

    rule, draft_mode  how its rounds are verified, and how nodes are drawn for it
    uses_drafters     whether drafters may grow trees for it
    secret            of the verifier, for `key`
    """

    number: int
    request: VerifierRequest
    rule: Rule
    draft_mode: DraftMode
    eos_ids: frozenset[int]
    strategy: DraftStrategy = BEST_FIRST
    uses_drafters: bool = True
    secret: int = field(default=0, repr=False)
    state: State = State.QUEUED

    # text and KV
    tokens: list[int] = field(default_factory=list)  # prompt and committed tokens
    hash: int = 0  # of tokens
    kv_slot: int | None = None
    fed: int = 0  # tokens whose KV is held
    num_cached: int | None = None  # prompt tokens whose KV was cached when it began
    stop_ids: frozenset[int] = field(init=False)  # tokens that end this generation
    matcher: TreeMatcher | None = None  # of the requested form of the output, at the end of the committed text
    history: History | None = None  # counts of the text's tokens, where penalties need them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    # drafts
    draft: Draft | None = None
    next_draft: Draft | None = None  # its tree at the drafter that it moves to, until growth has arrived from there
    local_drafts: tuple[LocalDraft, ...] = ()  # by look-up or by a draft head, while no drafter grows a tree
    local: LocalDraft | None = None  # that of the present round
    features: TextFeatures | None = None  # kept while a drafter with a head may draft for it
    unfit: set[str] = field(default_factory=set)  # names of drafters that can never draft for it
    # By name, drafters that had no nodes for it: (tokens of the pause, length of the text at which it ends).
    pauses: dict[str, tuple[int, int]] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)  # of rounds of its kind

    round: PresentRound = field(default_factory=PresentRound)

    # output
    counts: SpeculationStats = field(init=False)  # so far
    out: asyncio.Queue[Committed | ServiceError] = field(default_factory=asyncio.Queue)
    deadline_s: float | None = None  # on the clock of the event loop
    span: Span = INVALID_SPAN  # of the request, in a trace

    def __post_init__(self) -> None:
        own = frozenset(self.request.stopping.stop_token_ids)
        self.stop_ids = own if self.request.stopping.ignore_eos else own | self.eos_ids
        if self.request.sampling.penalised:
            self.history = History(self.request.prompt, self.request.committed)
        self.tokens = [*self.request.prompt, *self.request.committed]
        self.hash = prefix_hash(self.tokens)
        self.counts = SpeculationStats(verification=self.rule.value, seed=self.request.seed)

    def on(self, event: Event) -> None:
        """Change the state. RuntimeError: the event is illegal in the present state."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise RuntimeError(f"session {self.number}: event {event.value!r} is illegal in state {self.state.value!r}")
        self.state = following

    @property
    def done(self) -> bool:
        return self.state is State.FINISHED

    @property
    def has_run(self) -> bool:
        """It has had a KV slot; without one now it was preempted."""
        return self.num_cached is not None

    def end(self) -> None:
        """It takes part in no further step; what it holds is freed before the next one."""
        if not self.done:
            self.on(Event.FINISH)

    def late(self) -> DeadlineExceeded:
        """The error of a session whose deadline has passed."""
        phase = "queue" if self.kv_slot is None else "prefill" if self.prefill_left else "decode"
        return DeadlineExceeded(f"deadline of {self.request.deadline_s} s passed", metadata={"phase": phase})

    @property
    def key(self) -> Key:
        """Key of its random numbers. Under ratio tests two requests of one seed have different ones: the rounds of one request decide how
        many nodes the rounds of the other have (`speculation.py`). So have two attempts at a request: drafters of the first know the noise
        of some of its bonus tokens. The number of the session tells them apart even where `Admission` has forgotten the first. No drafter
        can compute them: clients choose seeds that are easily guessed."""
        attempt = f"{self.secret} {self.number} {self.request.epoch} {self.request.request_id}"
        own = 0 if self.rule is Rule.MATCH else number_of(attempt)
        return Key(self.request.seed ^ own, self.request.choice)

    @property
    def salt(self) -> str:
        """Salt of its cached prefixes. Log-probabilities of a prompt need a forward of all of it, so such a session has its own salt."""
        own = str(self.number) if self.request.prompt_logprobs is not None else ""
        # `repr` of all three: no name of a tenant can equal the salt of such a session.
        return repr((self.request.tenant, self.request.cache_salt, own))

    @property
    def shared(self) -> bool:
        """The bonus token follows the noise by which its drafter predicts it."""
        return self.draft is not None and self.draft.shared

    @property
    def required(self) -> bool:
        """It waits for trees whether or not waiting pays."""
        return self.request.speculation.mode is SpeculationMode.REQUIRED

    @property
    def text_kind(self) -> tuple[int, bool]:
        """(temperature in tenths, whether the form of the output is given): the acceptance of drafts differs between kinds."""
        return round(10 * self.request.sampling.temperature), self.request.structure is not None

    @property
    def num_held_logprobs(self) -> int:
        """Log-probabilities of its prompt, those of likely tokens included, that it holds or will hold until its first round sends them."""
        num_top = self.request.prompt_logprobs
        return 0 if num_top is None or self.counts.num_target_passes else (len(self.request.prompt) - 1) * (1 + num_top)

    @property
    def drafts(self) -> bool:
        """A drafter should draft for it now, whether or not it has one."""
        return self.uses_drafters and not self.done and (self.required or self.statistics.wants_trees(self.number))

    @property
    def prefill_left(self) -> int:
        """Tokens to prefill. The last token of the text is the root of the first round, which writes its KV."""
        return max(0, len(self.tokens) - 1 - self.fed)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        return self.request.stopping.max_tokens - self.num_output

    @property
    def prefix(self) -> Prefix:
        """State of the text that the processors of the next round need."""
        left = max(0, self.request.stopping.min_tokens - self.num_output)
        longest = max(map(len, self.request.sampling.bad_sequences), default=1) - 1
        output = self.tokens[len(self.tokens) - min(longest, self.num_output) :]
        return Prefix(self.history, left, tuple(self.stop_ids) if left else (), self.matcher, output)

    def opening(self, shape: Shape) -> Open:
        """The message that asks for a tree of this shape, or of a smaller one that the request asks for; without slot and text."""
        request, limits = self.request, shape.within(self.request.speculation)
        return Open(
            slot=0,
            epoch=request.epoch,
            prefix=(),
            sampling=request.sampling,
            law=self.draft_mode,
            # Only shared noise needs the seed itself; anything else gets a key from which no coin can be computed.
            seed=request.seed if self.draft_mode is DraftMode.COUPLED else self.key.derive(Role.DRAW),
            choice=request.choice,
            num_atoms=limits.atoms,
            node_cap=limits.node_cap,
            max_depth=limits.max_depth,
            topk=limits.topk,
            num_prompt=len(request.prompt),
            strategy=self.strategy,
        )

    def take_slot(self, kv_slot: int, num_cached: int) -> None:
        """Run on a KV slot that holds the first `num_cached` tokens of its text already."""
        self.on(Event.ADMIT)
        self.kv_slot, self.fed = kv_slot, num_cached
        if self.num_cached is None:
            self.num_cached = min(num_cached, len(self.request.prompt))

    def leave_slot(self) -> int:
        """Its KV slot, which the caller closes."""
        assert self.kv_slot is not None
        kv_slot, self.kv_slot, self.fed = self.kv_slot, None, 0
        return kv_slot

    def feed(self, size: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Record a chunk of prefill and its log-probabilities of the prompt, some of which are known after a preemption."""
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - self.fed :]
        self.fed += size

    def advance(
        self,
        tokens: tuple[int, ...],
        num_nodes: int,
        logprobs: tuple[TokenLogprob, ...] = (),
        tree: VerifiedTree | None = None,
        *,
        missed: bool,
        drafter: str = "",
    ) -> Committed:
        """Commit a verdict: accepted path + bonus token. Cut the run at the first stop; a stop beats length inside it.

        missed: the round waited for a tree in vain; drafter: drafter or local draft of the nodes that it verified."""
        offset = self.num_output
        run, stop_id = self._cut(tokens)
        accepted = tuple(i < len(tokens) - 1 for i in range(len(run)))
        counts = self.counts.after_round(num_nodes, sum(accepted), missed=missed)
        self.counts = replace(counts, drafter=drafter or counts.drafter)
        self.tokens += run
        for token in run:  # few: quicker one by one
            self.hash = extend_hash(self.hash, token)
        self.fed = len(self.tokens) - 1
        if self.history is not None:
            self.history.extend(run)
        fits = self.matcher is None or self.matcher.advance(run)
        prefilled = None
        if self.counts.num_target_passes == 1:
            prefilled = Prefilled(self.num_cached or 0, tuple(self.prompt_logprobs))
            self.prompt_logprobs = []
        finish = None
        if not fits:
            finish = self.finish(FinishReason.ABORTED)
        elif stop_id is not None:
            finish = self.finish(FinishReason.STOP, stop_id)
        elif self.tokens_left <= 0:
            finish = self.finish(FinishReason.LENGTH)
        return Committed(self.request.epoch, offset, run, accepted, finish, logprobs[: len(run)], tree, prefilled)

    def seen(self, tree: TokenTree, path: tuple[int, ...]) -> VerifiedTree | None:
        """The tree that a round verified, where the request asks for trees and there was one."""
        if not self.request.trees or len(tree) == 1:
            return None
        return VerifiedTree(tuple(tree.token[1:].tolist()), tuple(tree.parent[1:].tolist()), path)

    def finish(self, reason: FinishReason, stop_id: int | None = None) -> Finish:
        self.end()
        return Finish(reason, stop_id, self.counts)

    def _cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
        for i, token in enumerate(tokens[: self.tokens_left]):
            if token in self.stop_ids:
                return tokens[: i + 1], token
        return tokens[: self.tokens_left], None


def choose_rule(
    request: VerifierRequest, default_mode: DraftMode, default: DraftStrategy = BEST_FIRST
) -> tuple[Rule, DraftMode, DraftStrategy]:
    """The rule, the draft mode and the draft strategy of a request.

    default: strategy of the drafters, for requests that name none. Greedy decoding is always verified by match, to which every lossless
    rule reduces at temperature 0. A rule that can verify one construction alone selects that construction.

    InvalidRequest: the rule asked for would not be lossless on the trees asked for."""
    wish = request.speculation
    candidates = [wish.strategy] if wish.strategy is not None else [_only_for(wish) or default, BEST_FIRST]
    for strategy in candidates:
        try:
            rule, mode = _rule_and_mode(request, default_mode, strategy)
            strategy.check_mode(mode)
            check_rule(strategy, mode, rule)
            return rule, mode, strategy
        except ValueError as error:
            refusal = error
    requested = wish.rule.value if wish.rule is not None else str(wish.strategy or default)
    raise InvalidRequest("speculation.verification", requested, f"cannot be served: {refusal}")


def _only_for(wish: Speculation) -> DraftStrategy | None:
    """The construction of a request that names none, if its rule or draft mode allows one kind of tree alone."""
    if wish.rule is Rule.BLOCK:
        return DraftStrategy("chain", (min(wish.max_depth or CHAIN_LENGTH, MAX_BRANCHING),))
    copies = wish.rule is Rule.MULTI_STEP or wish.law is DraftMode.IID
    return DraftStrategy("iid", COPIES) if copies else None


def _rule_and_mode(
    request: VerifierRequest, default_mode: DraftMode, strategy: DraftStrategy
) -> tuple[Rule, DraftMode]:
    wish = request.speculation
    mode = wish.law or strategy.mode
    if wish.rule is not None:
        check_rule(strategy, mode or DraftMode.SAMPLED, wish.rule)
    if request.sampling.greedy:
        return Rule.MATCH, mode if mode is not None and not mode.ratio else DraftMode.TOP_K
    if wish.rule is Rule.MATCH:
        return Rule.MATCH, mode if mode is not None and (wish.law or not mode.ratio) else DraftMode.COUPLED
    mode = mode or (DraftMode.SAMPLED if not default_mode.ratio and wish.rule is not None else default_mode)
    if not mode.ratio and wish.rule is None:
        return Rule.MATCH, mode
    return wish.rule or (Rule.MULTI_STEP if mode is DraftMode.IID else Rule.TRAVERSAL), mode


def check_drafter(requested: str, known: Sequence[str]) -> None:
    """NotFound: a request asks for a pool of drafters, or for local drafts, that this verifier does not have."""
    if requested and requested not in known:
        fix = f"use one of {', '.join(map(repr, known))}, or leave it out"
        raise NotFound(
            f"speculation.drafter: {requested[:64]!r} is unknown here; {fix}", metadata={"field": "speculation.drafter"}
        )


def number_of(name: str, key: bytes = b"") -> int:
    """A 64-bit hash of a name. With a key (16 bytes) nobody without it can find the name by trying names."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest(), "little")
