"""One engine step on the target model: rows → ONE forward → processed laws → verdicts → KV commit. Runs on the model's thread.

Nothing here knows of streams, sessions or time. Host work per round is O(tree × K); whatever is O(V) stays where the logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.audit import Draws
from rootward.core.living_tree import Row, Snapshot
from rootward.core.requests import Rule, Sampling, TokenLogprob
from rootward.core.rng import Key
from rootward.core.tree import TokenTree, root_only
from rootward.engine.head_model import DraftHead
from rootward.engine.processors import Prefix, adjusted
from rootward.engine.sampling import token_logprobs
from rootward.engine.verify import LawFunction, decide, forest_law
from rootward.ports import COMMITTED, LanguageModel, Rows
from verifier_service.head_drafts import HeadDrafts, Wanted

FILL = 1 << 40  # ids of the end of the prefill among the nodes of a round


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill: tokens that extend the committed chain of a KV slot.

    follow           token after each of the first ones, where log-probabilities of the prompt are wanted
    num_top          likeliest tokens whose log-probabilities are wanted beside each
    prompt_logprobs  filled by the step
    session          number of the session, by which a draft head knows its text
    num_features     positions at the end of the chunk whose fused features are wanted
    features         filled by the step
    """

    kv_slot: int
    tokens: tuple[int, ...]
    follow: tuple[int, ...] = ()
    num_top: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    session: int = 0
    num_features: int = 0
    features: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def num_logits(self) -> int:
        return len(self.tokens) if self.follow else 1


@dataclass(frozen=True, slots=True)
class Round:
    """Verification of one session: root token, its absolute position + 1 = length of the committed text, and a tree (None: none).

    prefix    what processors need to know of that text
    logprobs  as in `VerifierRequest`
    shared    the bonus token follows noise that the drafter knows (algorithms.md 6.6)
    drafter   address of the drafter that grew the tree; "" for a local tree, or none
    copies    siblings are i.i.d. copies, each drawn from the whole row
    num_successors  most likely next tokens that are wanted of every row
    fill      the end of the prefill: tokens right before the root whose KV the same forward makes
    wanted    a tree that a draft head grows before the forward; it becomes `snapshot`
    session   number of the session, by which a draft head knows its text
    wants_features  fused features of what is committed are wanted
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
    wanted: Wanted | None = None
    session: int = 0
    wants_features: bool = False

    @property
    def tree(self) -> TokenTree:
        return self.snapshot.tree if self.snapshot is not None else root_only()

    @property
    def rows(self) -> Sequence[Row | None]:
        """The declared draft distribution of each node."""
        return self.snapshot.rows if self.snapshot is not None else (None,)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round committed: accepted draft tokens, then the bonus token. `expected` is the closed-form block efficiency of the
    tree (free of coin noise); 0 under target matching."""

    tokens: tuple[int, ...]
    num_nodes: int
    expected: float = 0.0
    path: tuple[int, ...] = ()  # numbers of the accepted nodes, in draw order from 1
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token where they are asked for
    successors: tuple[
        tuple[int, tuple[int, ...]], ...
    ] = ()  # (token of a node, the target's most likely tokens after it)
    draws: Draws | None = field(default=None, compare=False)  # what the audit of the drafter looks at
    features: NDArray[np.float32] | None = field(
        default=None, compare=False
    )  # of fill, root and path, where they are wanted


class Runner:
    """Drives a target model. `law` is the law of ratio tests; tests swap in wrong ones to show that they are detected. `heads`: trees of a
    draft head, which is shown the hidden states of every forward. `head`: fuses the features that drafters want; alone it costs nothing.
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
        self.heads, self.head = heads, head if heads is None else heads.model
        self._exposed = False

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        self.step(chunks, [])

    def verify(self, rounds: Sequence[Round]) -> list[Outcome]:
        """One round for every session, in order."""
        return self.step([], rounds)

    def drafted(self, rounds: Sequence[Round]) -> tuple[list[Round], float]:
        """The rounds with the trees that a draft head grows for them, and the seconds that took."""
        wanted = [r.wanted for r in rounds if r.wanted is not None]
        if self.heads is None or not wanted:
            return list(rounds), 0.0
        grown = dict(zip((one.session for one in wanted), self.heads.grow(wanted), strict=True))
        found = [r if r.wanted is None else replace(r, snapshot=grown[r.wanted.session]) for r in rounds]
        return found, self.heads.draft_s

    def forget(self, session: int) -> None:
        """It has ended."""
        if self.heads is not None:
            self.heads.forget(session)

    def step(self, chunks: Sequence[Chunk], rounds: Sequence[Round]) -> list[Outcome]:
        """Prefill and rounds in ONE forward; the outcomes of the rounds, in order."""
        wants_features = any(c.num_features for c in chunks) or any(r.wants_features for r in rounds)
        self._expose(wanted=self.heads is not None or wants_features)
        slots = [c.kv_slot for c in chunks] + [r.kv_slot for r in rounds]
        firsts = [] if self.heads is None else [self.model.length(slot) for slot in slots]
        batch = [Rows.chain(c.kv_slot, 0, c.tokens) for c in chunks] + [_rows(r) for r in rounds]
        num_logits = [c.num_logits for c in chunks] + [len(r.tree) for r in rounds]
        logits_TV = self.model.forward(batch, num_logits=num_logits)
        self._filled(chunks, logits_TV)
        outcomes = self._decided(rounds, logits_TV[sum(c.num_logits for c in chunks) :]) if rounds else []
        if self.heads is not None:
            self._observe(self.heads, firsts, chunks, rounds, outcomes)
        return self._fused(chunks, rounds, outcomes) if wants_features else outcomes

    def _expose(self, *, wanted: bool) -> None:
        """Whether forwards leave their hidden states: on a GPU a change costs its recorded graphs."""
        if wanted != self._exposed:
            assert self.head is not None
            self.model.expose(self.head.reads if wanted else ())
            self._exposed = wanted

    def _fused(self, chunks: Sequence[Chunk], rounds: Sequence[Round], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes with the features that are wanted; all of a step are fused together."""
        assert self.head is not None
        rows: list[range | list[int]] = []
        at = 0
        for chunk in chunks:
            end = at + len(chunk.tokens)
            rows.append(range(end - min(chunk.num_features, len(chunk.tokens)), end))
            at = end
        for r, outcome in zip(rounds, outcomes, strict=True):
            rows.append(_committed_rows(r, outcome, at) if r.wants_features else [])
            at += len(r.fill) + len(r.tree)
        wanted = torch.tensor([row for own in rows for row in own])
        states = self.model.states
        fused = self.head.fuse(states.index_select(0, wanted.to(states.device))).cpu().numpy()
        parts = np.split(fused, np.cumsum([len(own) for own in rows])[:-1])
        for chunk, part in zip(chunks, parts, strict=False):
            chunk.features.append(part)
        return [replace(o, features=part) for o, part in zip(outcomes, parts[len(chunks) :], strict=True)]

    def _observe(
        self,
        heads: HeadDrafts,
        firsts: Sequence[int],
        chunks: Sequence[Chunk],
        rounds: Sequence[Round],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Show the states of what was committed to the head. firsts: position of each entry's first row."""
        states, at = self.model.states, 0
        for chunk, first in zip(chunks, firsts, strict=False):
            heads.observe(chunk.session, first, states[at : at + len(chunk.tokens)])
            at += len(chunk.tokens)
        for r, first, outcome in zip(rounds, firsts[len(chunks) :], outcomes, strict=True):
            heads.observe(r.session, first, states[_committed_rows(r, outcome, at)])
            at += len(r.fill) + len(r.tree)

    def _filled(self, chunks: Sequence[Chunk], logits_TV: torch.Tensor) -> None:
        at = 0
        for chunk in chunks:
            if chunk.follow:
                rows = logits_TV[at : at + len(chunk.follow)]
                chunk.prompt_logprobs.extend(token_logprobs(rows, chunk.follow, chunk.num_top))
            at += chunk.num_logits
            self.model.commit(chunk.kv_slot, len(chunk.tokens) - 1, keep_below=False)

    def _decided(self, rounds: Sequence[Round], logits_TV: torch.Tensor) -> list[Outcome]:
        """Verdicts on the logits of all rows of all rounds; what they accept is committed to the KV cache."""
        ends = np.cumsum([len(r.tree) for r in rounds])
        starts = ends - [len(r.tree) for r in rounds]
        scores_TV = adjusted(logits_TV, [(r.sampling, r.prefix, r.tree) for r in rounds])
        outcomes = []
        decisions = decide(rounds, scores_TV, self.law)
        for r, start, decision in zip(rounds, starts.tolist(), decisions, strict=True):
            tree, stop, bonus = r.tree, decision.stop, decision.bonus
            # The invariant that keeps a verified node from being verified twice (algorithms.md, L4).
            assert r.rule is Rule.MATCH or bonus not in tree.token[tree.parent == stop]
            self.model.commit(r.kv_slot, stop, keep_below=False)
            tokens = (*tree.path(stop), bonus)
            logprobs = _logprobs(r, start, stop, tokens, logits_TV)
            path = tuple(np.flatnonzero(tree.ancestors[stop])[1:].tolist())
            successors = _successors(r, logits_TV[start : start + len(tree)])
            outcomes.append(
                Outcome(tokens, len(tree) - 1, decision.expected, path, logprobs, successors, decision.draws)
            )
        return outcomes


def _committed_rows(r: Round, outcome: Outcome, at: int) -> list[int]:
    """Rows of the forward that a round has committed: its fill, the root and the accepted path. at: its first row."""
    root = at + len(r.fill)
    return [*range(at, root + 1), *(root + node for node in outcome.path)]


def _successors(r: Round, logits_NV: torch.Tensor) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of every row of the round, those of rejected nodes included; best first."""
    if not r.num_successors:
        return ()
    likely = torch.topk(logits_NV, min(r.num_successors, logits_NV.shape[1])).indices.tolist()
    return tuple((token, tuple(ids)) for token, ids in zip((r.root, *r.tree.token[1:].tolist()), likely, strict=True))


def _rows(r: Round) -> Rows:
    """The end of the prefill as a chain, the root at its end, the tree below."""
    tree, num = r.tree, len(r.fill)
    fill = FILL + np.arange(num, dtype=np.int64)
    parent = np.concatenate([fill - 1, tree.parent])
    parent[num] = FILL + num - 1
    parent[0] = COMMITTED
    token = np.concatenate([np.array([*r.fill, r.root], dtype=np.int64), tree.token[1:]])
    return Rows(r.kv_slot, np.concatenate([fill, np.arange(len(tree))]), parent, token)


def _logprobs(
    r: Round, start: int, stop: int, tokens: tuple[int, ...], logits_TV: torch.Tensor
) -> tuple[TokenLogprob, ...]:
    """Token i of the run follows node i of the path from the root to the stop node."""
    if r.logprobs is None:
        return ()
    rows = [start + int(node) for node in np.flatnonzero(r.tree.ancestors[stop])]  # parents come first
    return tuple(token_logprobs(logits_TV[rows], tokens, r.logprobs))
