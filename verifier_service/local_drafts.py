"""Trees of the verifier itself, while no drafter has grown one (protocol.md 1.3): looked up in the text, or grown by a draft head.

A tree that is looked up is a function of the committed text, and all its nodes are chosen, so any rule may verify it: by match, or by ratio
tests under one-hot distributions. The nodes of a drafter take no part in such a round and stay valid (algorithms.md 6.1). A local tree
therefore replaces *plain decoding* only: no node of a drafter's tree may have arrived. Whether there is a local tree depends on the state
of the drafter (none, lost, no growth yet), never on its nodes. Its speed-up is learned apart from that of drafters.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rootward.core.frames import Open
from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.lookup import (
    WIDTH,
    Memories,
    Merged,
    Recipe,
    Recycling,
    Source,
    extend_tree,
)
from rootward.core.requests import DraftMode, Rule, SpeculationMode
from rootward.ports import TreeToGrow
from verifier_service.session import Session
from verifier_service.settings import HEAD, VerifierSettings
from verifier_service.speculation import RoundResult, SpeculationController, Statistics

CHUNK = 256  # most tokens of a text that its source reads before a round, in a fraction of a millisecond
LOOKED_UP = "ngram+recycling"  # what a request may ask for where a head is the default
BESIDE_HEAD = "ngram"  # looked up where a head drafts: costs nothing, and is better where a text repeats itself
ASK_OTHER_EVERY = 16  # at texts whose length is a multiple, the draft of the lowest rank is asked first
LEARN_EVERY = 4  # steps of plain decoding for each row that is learned from, on average over all sessions
NOT_LOOKED_UP = (Rule.BLOCK, Rule.MULTI_STEP)  # rules of chains and of copies: a tree that is looked up here is neither
LEAST_SCORE = 0.1  # of a drafted path; how many of the drafted nodes are verified is learned


@dataclass(slots=True, eq=False)
class LocalDraft:
    """The local draft of one session, by one method.

    source      in which trees are looked up; None: a draft head grows them
    statistics  of rounds with such trees
    opening     of trees of a draft head; the tree is grown right before the forward that verifies it
    fed         tokens that the source has read
    length      of the text for which `cap` and `tree` were planned
    cap         most nodes of the tree
    seconds     that looking the tree up took
    launched    the round that runs verifies the tree
    """

    name: str
    source: Source | None
    statistics: Statistics
    opening: Open | None = None
    fed: int = 0
    length: int = -1
    cap: int = 0
    tree: Snapshot | None = None
    seconds: float = 0.0
    launched: bool = False

    @property
    def successors(self) -> Recycling | None:
        """The part of `source` that learns the most likely next tokens of every verified row; None: it has no such part."""
        parts = self.source.sources if isinstance(self.source, Merged) else (self.source,)
        return next((part for part in parts if isinstance(part, Recycling)), None)

    @property
    def num_nodes(self) -> int:
        """Rows that its tree takes in the present round, at most."""
        if self.opening is not None:
            return self.cap
        return len(self.tree.ids) - 1 if self.tree is not None else 0

    def rank(self, load: int) -> float:
        """The draft of a session with the highest rank is asked first. load: sessions that share the steps."""
        return self.statistics.speedup if load == 1 else self.statistics.present_tokens

    def drop(self) -> None:
        """The present round has no tree."""
        self.cap, self.tree = 0, None


class LocalDrafts:
    """Local drafts of all sessions of a verifier."""

    def __init__(self, settings: VerifierSettings, vocab_size: int, controller: SpeculationController) -> None:
        self._settings, self._shape, self._vocab_size = settings, settings.shape, vocab_size
        self._has_head = settings.grows_head
        self._recipes = _recipes(settings.local_draft)
        self._memories = Memories()  # one for each salt: texts that may share cached prefixes share a memory
        self._controller = controller

    @property
    def names(self) -> tuple[str, ...]:
        """Names of local drafts that a request may ask for."""
        return (*(["head"] if self._has_head else []), *self._recipes)

    def grows(self, drafter: str, rule: Rule) -> bool:
        """Whether a request that requires trees of this name ("": of any drafter) for this rule gets them here."""
        if self._has_head and drafter in ("", "head"):
            return True
        return drafter in self._recipes and rule not in NOT_LOOKED_UP

    def attach(self, session: Session) -> None:
        """Give a session that begins its local drafts: a head, look-up, or both, of which each round takes one.

        A session that requires trees has the head alone, because nothing is learned of the speed-up of its drafts."""
        request, wish = session.request, session.request.speculation
        if wish.mode is SpeculationMode.DISABLED:
            return
        drafts = []
        with_head = self._has_head and wish.drafter in ("", "head")
        recipe = self._recipes.get(wish.drafter or (BESIDE_HEAD if with_head else self._settings.local_draft))
        if recipe is not None and session.rule not in NOT_LOOKED_UP and not (with_head and session.required):
            mode = DraftMode.COUPLED if session.rule is Rule.MATCH else DraftMode.SAMPLED
            statistics = self._controller.of(("local", recipe.name, session.rule, *session.text_kind))
            memory = self._memories.of(session.salt)
            source = recipe.source(mode, memory, request.prediction, len(request.prompt))
            drafts.append(LocalDraft(recipe.name, source, statistics))
        if with_head:
            opening = replace(session.opening(self._shape), eos_ids=tuple(session.stop_ids))
            kind = "head", session.rule, session.draft_mode, session.strategy, *session.text_kind
            statistics = self._controller.of(kind)
            drafts.append(LocalDraft("head", None, statistics, opening))
        session.local_drafts, session.local = tuple(drafts), drafts[0] if drafts else None

    def plan(self, session: Session, most: int, load: int) -> int:
        """Nodes of the tree that stands in for plain decoding in the present round; planned once per round, at most `most`. load: sessions
        that share the steps.

        With one session the draft with the higher speed-up so far is asked first; with several, which wait for each other's drafts in any
        case, the one that commits more tokens. Now and then the other is first, so that its statistics stay current. A look-up that finds
        nothing leaves the round to the next draft. The choice depends on the committed text and earlier rounds alone.
        """
        if session.local is None:
            return 0
        if session.local.length == len(session.tokens):
            return session.local.num_nodes
        alone = session.draft is None or not session.draft.has_growth  # for reasons outside of any tree
        drafts = sorted(session.local_drafts, key=lambda draft: -draft.rank(load))
        for local in drafts if len(session.tokens) % ASK_OTHER_EVERY else reversed(drafts):
            session.local = local
            local.length, local.cap, local.tree = len(session.tokens), 0, None
            if alone:
                local.cap = max(0, most) if session.required else local.statistics.begin_round(session.number, most)[0]
                if local.cap and local.source:
                    begun_s = time.perf_counter()
                    local.tree = self._look_up(session, local.source, local)
                    local.seconds = time.perf_counter() - begun_s
            if local.num_nodes:
                break
        return session.local.num_nodes

    @staticmethod
    def launch(session: Session, drafted: Snapshot | None) -> Snapshot | None:
        """The tree that the beginning round verifies: the drafter's if it has any nodes (`drafted`), otherwise the local one."""
        local = session.local
        if local is None:
            return drafted
        local.launched = drafted is None and local.num_nodes > 0
        return local.tree if local.launched else drafted

    @staticmethod
    def wanted(session: Session) -> TreeToGrow | None:
        """The tree that the draft head grows for the beginning round; None: it grows none."""
        local = session.local
        if local is None or local.opening is None or not local.launched:
            return None
        return TreeToGrow(session.number, session.tokens, local.opening, local.cap)

    @staticmethod
    def num_successors(session: Session, load: int) -> int:
        """How many of the most likely next tokens of each row the local drafts learn: those that were asked for this round's tree, and now
        and then in plain decoding. load: sessions that share the steps."""
        length, local = len(session.tokens), session.local
        if length % (LEARN_EVERY * load) and not (local is not None and local.launched):
            return 0
        learns = any(draft.length == length and draft.successors for draft in session.local_drafts)
        return WIDTH if learns else 0

    @staticmethod
    def learn_successors(session: Session, successors: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Learn (token of a verified node, the target's most likely tokens after it): Token Recycling fed with the target's own rows."""
        for local in session.local_drafts:
            if (table := local.successors) is not None:
                for token, likely in successors:
                    table.replace(token, likely)

    def _look_up(self, session: Session, source: Source, local: LocalDraft) -> Snapshot | None:
        """A new tree of the source; None if it finds no continuation, or has not read all of the text yet."""
        tokens, limits = session.tokens, self._shape.within(session.request.speculation)
        source.extend(tokens[local.fed : local.fed + CHUNK])
        local.fed = min(len(tokens), local.fed + CHUNK)
        if local.fed < len(tokens):
            return None
        tree = LivingTree(len(tokens), 0, vocab_size=self._vocab_size, node_cap=local.cap, eos_ids=session.stop_ids)
        tree.root.token = tokens[-1]
        size = extend_tree(tree, source, max_depth=limits.max_depth, topk=limits.topk, least_score=LEAST_SCORE)
        return tree.snapshot(size) if size else None


def learn(
    session: Session, num_nodes: int, path: tuple[int, ...], *, draft_s: float | None, load: int, speed: float
) -> None:
    """Learn from a committed round without a drafter's nodes, in which `num_nodes` nodes of a local tree were verified.

    draft_s: time of a draft head in the step, None if that is not to be learned from; load: sessions that share the step, each of which
    looks its tree up; speed: `StepTime.speed`."""
    for local in session.local_drafts:
        if local.opening is None and local.cap and local.tree is None and local.length == len(session.tokens):
            result = RoundResult(found_nothing=True)
        elif local is not session.local:
            result = RoundResult()
        elif local.opening is None:
            result = RoundResult(num_nodes, num_nodes, path, load * local.seconds / speed)
        else:
            target = local.cap if local.launched and num_nodes else 0
            result = RoundResult(target, target, path, None if draft_s is None else draft_s / speed)
        local.statistics.add(session.number, result)


def _recipes(names: str) -> dict[str, Recipe]:
    """Recipes by name: the sources of the setting together, and each alone. With a draft head those of LOOKED_UP, on request."""
    if names == "none":
        return {}
    names = LOOKED_UP if names.startswith(HEAD) else names
    return {name: Recipe(name, tuple(name.split("+"))) for name in (names, *names.split("+"))}
