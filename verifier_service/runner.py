"""One engine step on the target model: one forward for all chunks and rounds, then verdicts, then the KV commit.

    rows       the tokens of each prefill chunk; of each round the end of its prefill, the root and the nodes of its tree
    forward    one call for all rows
    verdicts   processors on the logits of each row, then the rule of each round (`engine.verify.decide`)
    commit     the rows of the chunks, and of each round the rows down to its stop node, enter the committed KV
    states     hidden states of the committed rows go to the draft head, and to drafters that want features

Runs on the thread of the model. The module knows neither sessions nor streams. Host work per round is O(tree x K); work that is
O(vocabulary) runs on the device of the logits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.audit import Draws
from rootward.core.living_tree import Row, Snapshot
from rootward.core.requests import Rule, Sampling, TokenLogprob
from rootward.core.rng import Key
from rootward.core.tree import TokenTree, root_only
from rootward.engine.processors import Prefix, adjusted
from rootward.engine.sampling import token_logprobs
from rootward.engine.verify import Decision, LawFunction, decide, forest_law
from rootward.ports import COMMITTED, LanguageModel, Rows, TreeToGrow
from verifier_service.head_drafts import HeadDrafts

if TYPE_CHECKING:  # a verifier without a head loads none
    from rootward.engine.head_model import DraftHead

FIRST_FILL_ID = 1 << 40  # node ids of the end of a prefill in a round; nodes of trees have smaller ones


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of prefill: tokens that extend the committed text of a KV slot.

    follow           prompt token after each of the first tokens, where log-probabilities of the prompt are wanted
    num_top          number of likeliest tokens whose log-probabilities are wanted beside each of these
    prompt_logprobs  output: log-probability of each token of `follow`
    session          number of the session; the draft head keeps its text under it
    first            position of the first token
    num_features     number of positions at the end of the chunk whose fused features are wanted
    features         output: one array float32[num_features, size], if any features of this step are wanted
    """

    kv_slot: int
    tokens: tuple[int, ...]
    follow: tuple[int, ...] = ()
    num_top: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    session: int = 0
    first: int = 0
    num_features: int = 0
    features: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def num_logits(self) -> int:
        return len(self.tokens) if self.follow else 1


@dataclass(frozen=True, slots=True)
class Round:
    """The verification of one session's tree.

    root            last committed token
    length          length of the committed text, the root included
    snapshot        the tree and its declared draft distributions; None: no tree
    prefix          state of the committed text for the processors
    logprobs        as in `VerifierRequest`
    shared          the bonus token follows noise that the drafter is told once the round runs (algorithms.md 6.6)
    fill            the end of the prefill: the tokens right before the root whose KV the same forward computes
    copies          siblings are i.i.d. copies, each drawn from the whole distribution
    num_successors  number of most likely next tokens wanted of every row
    drafter         address of the drafter that grew the tree; "": a local tree, or no tree
    wanted          a tree that the draft head grows before the forward; it becomes `snapshot`
    session         number of the session; the draft head keeps its text under it
    wants_features  fused features of the committed rows are wanted
    """

    kv_slot: int
    root: int
    length: int
    rule: Rule
    sampling: Sampling
    key: Key
    epoch: int
    snapshot: Snapshot | None = None
    prefix: Prefix = field(default_factory=Prefix)
    logprobs: int | None = None
    shared: bool = False
    fill: tuple[int, ...] = ()
    copies: bool = False
    num_successors: int = 0
    drafter: str = ""
    wanted: TreeToGrow | None = None
    session: int = 0
    wants_features: bool = False

    @property
    def tree(self) -> TokenTree:
        return self.snapshot.tree if self.snapshot is not None else root_only()

    @property
    def rows(self) -> Sequence[Row | None]:
        """The declared draft distribution of each node."""
        return self.snapshot.rows if self.snapshot is not None else (None,)

    @property
    def first(self) -> int:
        """Position of its first row."""
        return self.length - 1 - len(self.fill)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of a round.

    tokens      the accepted draft tokens, then the bonus token
    num_nodes   nodes that were verified, root excluded
    path        numbers of the accepted nodes, in draw order from 1
    tree        that was verified
    logprobs    one per token, where they are wanted
    successors  (token of a node, the target's most likely tokens after it, best first), where they are wanted
    draws       input of the audit of drafters
    features    float32[fill + root + path, size]: fused features, where they are wanted
    failure     why there is no verdict, as for logits that are no numbers; nothing else is set then
    """

    tokens: tuple[int, ...]
    num_nodes: int
    path: tuple[int, ...] = ()
    tree: TokenTree = field(default_factory=root_only, compare=False)
    logprobs: tuple[TokenLogprob, ...] = ()
    successors: tuple[tuple[int, tuple[int, ...]], ...] = ()
    draws: Draws | None = field(default=None, compare=False)
    features: NDArray[np.float32] | None = field(default=None, compare=False)
    failure: Exception | None = None


class Runner:
    """Runs the steps of a target model.

    law    law of ratio tests; tests replace it to show that wrong laws are detected
    heads  trees of a draft head; it observes the hidden states of every forward
    head   the draft head that fuses features for drafters; without `heads` it costs nothing until features are wanted

    draft_s     time that the draft head took to grow trees in the last step
    catches_up  it took longer than usual: the head read a text of more than one round (`HeadDrafts.catches_up`)
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        law: LawFunction = forest_law,
        heads: HeadDrafts | None = None,
        head: DraftHead | None = None,
    ) -> None:
        self.model = model
        self.law = law
        self.heads = heads
        self.head = head if heads is None else heads.model
        self.draft_s, self.catches_up = 0.0, False
        self._exposed = False

    def forget(self, session: int) -> None:
        """The session has ended."""
        if self.heads is not None:
            self.heads.forget(session)

    def step(self, chunks: Sequence[Chunk], rounds: Sequence[Round]) -> list[Outcome]:
        """Grow the trees that the draft head is asked for, then compute all chunks and rounds in one forward. Returns the outcomes of the
        rounds, in order; those of chunks are in the chunks."""
        rounds = self._drafted(rounds)
        wants_features = any(c.num_features for c in chunks) or any(r.wants_features for r in rounds)
        self._expose(wanted=self.heads is not None or wants_features)
        batch = [Rows.chain(c.kv_slot, 0, c.tokens) for c in chunks] + [_rows(r) for r in rounds]
        num_logits = [c.num_logits for c in chunks] + [len(r.tree) for r in rounds]
        logits_TV = self.model.forward(batch, num_logits=num_logits)
        self._commit_chunks(chunks, logits_TV)
        outcomes = self._verify(rounds, logits_TV[sum(c.num_logits for c in chunks) :]) if rounds else []
        if not self._exposed:
            return outcomes
        committed = _committed_rows(chunks, rounds, outcomes)
        if self.heads is not None:
            entries: list[Chunk | Round] = [*chunks, *rounds]
            states = self.model.states  # puts the layers together: once for all entries
            for entry, rows in zip(entries, committed, strict=True):
                self.heads.observe(entry.session, entry.first, _selected(states, rows))
        return self._with_features(chunks, rounds, outcomes, committed) if wants_features else outcomes

    def _drafted(self, rounds: Sequence[Round]) -> Sequence[Round]:
        """The rounds with the trees that the draft head grows for them."""
        self.draft_s, self.catches_up = 0.0, False
        wanted = [r.wanted for r in rounds if r.wanted is not None]
        if self.heads is None or not wanted:
            return rounds
        start_s = time.perf_counter()
        trees = iter(self.heads.grow(wanted))
        found = [r if r.wanted is None else replace(r, snapshot=next(trees)) for r in rounds]
        self.draft_s, self.catches_up = time.perf_counter() - start_s, self.heads.catches_up
        return found

    def _expose(self, *, wanted: bool) -> None:
        """Make forwards leave their hidden states, or stop it. On a GPU forwards that leave them replay no recorded graph."""
        if wanted != self._exposed:
            assert self.head is not None
            self.model.expose(self.head.reads if wanted else ())
            self._exposed = wanted

    def _commit_chunks(self, chunks: Sequence[Chunk], logits_TV: torch.Tensor) -> None:
        at = 0
        for chunk in chunks:
            if chunk.follow:
                rows = logits_TV[at : at + len(chunk.follow)]
                chunk.prompt_logprobs.extend(token_logprobs(rows, chunk.follow, chunk.num_top))
            at += chunk.num_logits
            self.model.commit(chunk.kv_slot, len(chunk.tokens) - 1, keep_below=False)

    def _verify(self, rounds: Sequence[Round], logits_TV: torch.Tensor) -> list[Outcome]:
        """Verdicts on the logits of all rows of all rounds. The accepted paths enter the committed KV."""
        ends = np.cumsum([len(r.tree) for r in rounds])
        starts = ends - [len(r.tree) for r in rounds]
        outcomes = []
        for r, start, decision in zip(rounds, starts.tolist(), self._decided(rounds, logits_TV), strict=True):
            if isinstance(decision, Exception):
                outcomes.append(Outcome((), 0, failure=decision))
                continue
            tree, stop, bonus = r.tree, decision.stop, decision.bonus
            # The invariant that keeps a verified node from being verified twice (algorithms.md, L4).
            assert r.rule is Rule.MATCH or bonus not in tree.token[tree.parent == stop]
            self.model.commit(r.kv_slot, stop, keep_below=False)
            tokens = (*tree.path(stop), bonus)
            outcome = Outcome(
                tokens=tokens,
                num_nodes=len(tree) - 1,
                path=tuple(np.flatnonzero(tree.ancestors[stop])[1:].tolist()),
                tree=tree,
                logprobs=_logprobs(r, start, stop, tokens, logits_TV),
                successors=_successors(r, logits_TV[start : start + len(tree)]),
                draws=decision.draws,
            )
            outcomes.append(outcome)
        return outcomes

    def _decided(self, rounds: Sequence[Round], logits_TV: torch.Tensor) -> list[Decision | Exception]:
        """The verdict of each round. If one of them fails, the others are decided without it."""
        try:
            scores_TV = adjusted(logits_TV, [(r.sampling, r.prefix, r.tree) for r in rounds])
            return [*decide(rounds, scores_TV, self.law)]
        except Exception as error:  # a bug, or logits that are no numbers
            if len(rounds) == 1:
                return [error]
        parts = torch.split(logits_TV, [len(r.tree) for r in rounds])
        return [self._decided([r], part)[0] for r, part in zip(rounds, parts, strict=True)]

    def _with_features(
        self,
        chunks: Sequence[Chunk],
        rounds: Sequence[Round],
        outcomes: Sequence[Outcome],
        committed: Sequence[list[int]],
    ) -> list[Outcome]:
        """The outcomes with the wanted features. All rows of a step are fused together. committed: see `_committed_rows`."""
        assert self.head is not None
        wanted = [rows[len(rows) - c.num_features :] for c, rows in zip(chunks, committed, strict=False)]
        wanted += [rows if r.wants_features else [] for r, rows in zip(rounds, committed[len(chunks) :], strict=True)]
        states = self.model.states
        index = torch.tensor([row for rows in wanted for row in rows])
        fused = self.head.fuse(states.index_select(0, index.to(states.device))).cpu().numpy()
        parts = np.split(fused, np.cumsum([len(rows) for rows in wanted])[:-1])
        for chunk, part in zip(chunks, parts, strict=False):
            chunk.features.append(part)
        return [replace(o, features=part) for o, part in zip(outcomes, parts[len(chunks) :], strict=True)]


def _committed_rows(chunks: Sequence[Chunk], rounds: Sequence[Round], outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Rows of the forward that were committed, of each chunk, then of each round: all of a chunk; the fill, the root and the accepted path
    of a round."""
    committed: list[list[int]] = []
    at = 0
    for chunk in chunks:
        committed.append(list(range(at, at + len(chunk.tokens))))
        at += len(chunk.tokens)
    for r, outcome in zip(rounds, outcomes, strict=True):
        root = at + len(r.fill)
        committed.append([*range(at, root + 1), *(root + node for node in outcome.path)])
        at = root + len(r.tree)
    return committed


def _selected(states: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows. On a CPU by numpy: by torch it took 1 % of a step of SmolLM2 (AMD EPYC of Zen 5), since its code was in no cache."""
    if states.device.type == "cpu" and states.dtype == torch.float32:
        return torch.from_numpy(states.numpy()[rows])
    return states.index_select(0, torch.tensor(rows, device=states.device))


def _successors(r: Round, logits_NV: torch.Tensor) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Most likely next tokens of every row of the round, rejected nodes included."""
    if not r.num_successors:
        return ()
    likely = torch.topk(logits_NV, min(r.num_successors, logits_NV.shape[1])).indices.tolist()
    return tuple((token, tuple(ids)) for token, ids in zip((r.root, *r.tree.token[1:].tolist()), likely, strict=True))


def _rows(r: Round) -> Rows:
    """The end of the prefill as a chain, the root below its end, the tree below the root."""
    tree, num = r.tree, len(r.fill)
    fill = FIRST_FILL_ID + np.arange(num, dtype=np.int64)
    parent = np.concatenate([fill - 1, tree.parent])
    parent[num] = FIRST_FILL_ID + num - 1
    parent[0] = COMMITTED
    token = np.concatenate([np.array([*r.fill, r.root], dtype=np.int64), tree.token[1:]])
    return Rows(r.kv_slot, np.concatenate([fill, np.arange(len(tree))]), parent, token)


def _logprobs(
    r: Round, start: int, stop: int, tokens: tuple[int, ...], logits_TV: torch.Tensor
) -> tuple[TokenLogprob, ...]:
    """Log-probability of each token of the run. Token i follows node i of the path from the root to the stop node."""
    if r.logprobs is None:
        return ()
    rows = [start + int(node) for node in np.flatnonzero(r.tree.ancestors[stop])]  # parents come first
    return tuple(token_logprobs(logits_TV[rows], tokens, r.logprobs))
