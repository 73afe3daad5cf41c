"""Drafting without a model: trees of continuations that occurred before.

A `Source` follows one text and proposes next tokens, each with an estimate of its probability; `extend_tree` appends its most likely paths
to a living tree. A tree is a deterministic function of the text, so every node is *chosen*, not drawn. Target matching may verify it, and
so may the ratio tests, with one-hot distributions (algorithms.md, section 4).

| source | proposes | method |
|---|---|---|
| Ngram | the continuations of the longest suffix of the text that occurred before | prompt lookup |
| Recycling | the last successors of a token, over all texts of a memory | Token Recycling, 2408.08696 |
| Prediction | the continuation of a given text, realigned after a difference | predicted outputs |
| Merged | the proposals of several sources, each token once, best score first | |
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode
from rootward.core.suffix_automaton import SuffixAutomaton


class Candidate(NamedTuple):
    """A proposed next token and an estimate of its probability, in (0, 1)."""

    token: int
    score: float


class Source(Protocol):
    """Follows one text and proposes continuations.

    States are hashable values of the source's own type, valid until the next `extend`. Equal states have equal candidates, so branches of a
    tree with equal states share one lookup (2407.16207).
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def start(self) -> Any:
        """The state at the end of the text."""

    def step(self, state: Any, token: int) -> Any:
        """The state after one more token."""

    def candidates(self, state: Any) -> Sequence[Candidate]:
        """Likely next tokens, each once, best score first."""


# -- from a source to a tree -------------------------------------------------------------------------------------------------


def extend_tree(tree: LivingTree, source: Source, *, max_depth: int, topk: int, least_score: float = 0.02) -> int:
    """Append the source's best paths to a tree as chosen nodes, up to its `node_cap`. Returns the number of new nodes.

    max_depth: longest path below the root; topk: most children of a node; least_score: a path less likely than this is not drafted.

    A path's score is the product of its candidates' scores; the best unused (node, candidate) becomes the next node. Nodes of earlier
    rounds are used again.
    """
    before = tree.next_id
    known: dict[Any, Sequence[Candidate]] = {}  # candidates by state
    heap: list[tuple[float, int, int, Any, float, int, int]] = []
    arrivals = 0

    def push(node: int, state: Any, score: float, depth: int, rank: int) -> None:
        """The candidate of this rank below a node whose path has this score."""
        nonlocal arrivals
        if state not in known:
            known[state] = source.candidates(state)[:topk]
        if rank < len(known[state]) and (own := score * known[state][rank].score) >= least_score:
            arrivals += 1  # breaks ties in order of arrival
            heapq.heappush(heap, (-own, arrivals, node, state, score, depth, rank))

    if tree.root.token not in tree.eos_ids and max_depth > 0:
        push(tree.root_id, source.start(), 1.0, 0, 0)
    while heap and len(tree) < tree.node_cap:
        minus, _, node, state, score, depth, rank = heapq.heappop(heap)
        push(node, state, score, depth, rank + 1)
        token = known[state][rank].token
        child = _child(tree, node, token, topk)
        if child is not None and token not in tree.eos_ids and depth + 1 < max_depth:
            push(child, source.step(state, token), -minus, depth + 1, 0)
    return tree.next_id - before


def _child(tree: LivingTree, node: int, token: int, topk: int) -> int | None:
    """The node's child with this token, new if it can be; None if the family is full."""
    family = tree.at(node).children
    kept = next((child for child in family if tree.nodes[child].token == token), None)
    if kept is not None or len(family) >= topk:
        return kept
    return tree.draw(node, token, sampled=False)


LEAST_PATH_SCORE = 0.3  # of a path that a client's prediction gives (`best_path`)


def best_path(source: Source, most: int) -> list[tuple[int, float]]:
    """The source's best path from the end of its text: (token, score) of each step, while their product is at least LEAST_PATH_SCORE."""
    state, path, score = source.start(), [], 1.0
    for _ in range(most):
        best = next(iter(source.candidates(state)), None)
        if best is None or score * best.score < LEAST_PATH_SCORE:
            break
        path.append((best.token, best.score))
        state, score = source.step(state, best.token), score * best.score
    return path


# -- sources -----------------------------------------------------------------------------------------------------------------

Match = tuple[int, int]  # state of the automaton, length of the string

MOST_COUNTED = 32  # most occurrences of a continuation that are counted
MOST_FOLLOWERS = 64  # most continuations of a context that are counted: those whose first occurrence is latest


class Ngram:
    """Continuations of earlier occurrences of the end of the text: of its longest suffix that has any.

    Scores are those of prediction by partial matching (Cleary and Witten 1984; its method C) with longer contexts trusted more:

        context of length ℓ, seen N times with d different successors:   score(x) = (1 − e)·n_x / N,   e = d / (d + ℓ·N)
    """

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.automaton.append(token)

    def start(self) -> Match:
        state = self.automaton.repeated_suffix
        return state, self.automaton.length(state)

    def step(self, state: Match, token: int) -> Match:
        return self.automaton.step(*state, token)

    def candidates(self, state: Match) -> list[Candidate]:
        here, length = state
        while here > 0:
            if counts := self._counts(here):  # empty if it occurred only at the end of the text
                total = sum(count for count, _ in counts.values())
                escape = len(counts) / (len(counts) + length * total)
                likeliest_first = sorted(counts.items(), key=lambda item: item[1], reverse=True)
                return [Candidate(token, (1.0 - escape) * count / total) for token, (count, _) in likeliest_first]
            here = self.automaton.link(here)
            length = self.automaton.length(here)
        return []

    def _counts(self, state: int) -> dict[int, tuple[int, int]]:
        """Token → (number of occurrences as continuation, position of the last one)."""
        followers = self.automaton.followers(state, MOST_FOLLOWERS)
        ends = {token: self.automaton.ends(after, MOST_COUNTED) for token, after in followers}
        return {token: (len(places), max(places)) for token, places in ends.items()}


WIDTH = 8  # successors of a token that are remembered, k of Token Recycling
NEWEST = 0.5  # estimated probability that the newest successor is right
NOTHING = -1  # before the first token


class Successors:
    """Token → its last WIDTH successors, newest first. May be shared by many texts of one vocabulary."""

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Tokens that have a row."""
        return len(self._rows)

    def row(self, token: int) -> Sequence[int]:
        return self._rows.get(token, ())

    def see(self, token: int, successor: int) -> None:
        row = self._rows.setdefault(token, [])
        if successor in row:
            row.remove(successor)
        row.insert(0, successor)
        del row[WIDTH:]

    def replace(self, token: int, successors: Sequence[int]) -> None:
        """Replace the successors by the target's most likely ones, best first (the update of the paper)."""
        self._rows[token] = list(successors[:WIDTH])


class Recycling:
    """Token Recycling ("Turning Trash into Treasure", 2408.08696): the last successors of every token. Reads one memory, writes to several.

    The paper keeps, for each token, the k likeliest next tokens of the last time the target saw it, and unfolds this matrix along a fixed
    tree of ranks. Where only committed tokens are seen, a row holds the k last *different* tokens that followed, the newest first. Score by
    rank: a(1 − a)^rank with a = NEWEST, under which best-first growth unfolds one fixed tree of ranks.

    also: memories that are updated by this text but not read for it.
    """

    def __init__(self, memory: Successors, also: Sequence[Successors] = ()) -> None:
        self.memory = memory
        self._learning = (memory, *also)
        self._last = NOTHING

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._last != NOTHING:
                for memory in self._learning:
                    memory.see(self._last, token)
            self._last = token

    def replace(self, token: int, successors: Sequence[int]) -> None:
        """Replace the successors of a token by the target's most likely ones, best first."""
        for memory in self._learning:
            memory.replace(token, successors)

    def start(self) -> int:
        return self._last

    def step(self, state: int, token: int) -> int:
        return token

    def candidates(self, state: int) -> list[Candidate]:
        return [Candidate(token, NEWEST * (1.0 - NEWEST) ** rank) for rank, token in enumerate(self.memory.row(state))]


MOST_PLACES = 64  # occurrences among which the next place is chosen
LEAST_MATCH = 2  # tokens that must agree at a new position
PREDICTION_CHUNK = 1024  # tokens of a prediction that are read at a time, in about a millisecond


class Cursor(NamedTuple):
    """at: possible next positions in the prediction, the most likely first. agreed: number of consecutive tokens that agreed.
    reached: position after the last one that agreed. state, length: the longest suffix of the output that occurs in the prediction."""

    at: tuple[int, ...]
    agreed: int
    reached: int
    state: int
    length: int


class Prediction:
    """A text that the output is expected to follow, for example a file that an edit changes in a few places.

    While the output agrees, the cursor moves through the prediction. After a difference the cursor moves to an occurrence of the end of the
    output in the prediction; as long as that is shorter than LEAST_MATCH, one token is assumed to be replaced or inserted.

    prediction: the expected output. It is read PREDICTION_CHUNK tokens at a time, with every `extend`, so that a long one holds up no
    other text; only what was read is searched. prefix: number of tokens of the text before the output; if their end occurs in the
    prediction, the output may start there.
    """

    def __init__(self, prediction: Sequence[int], *, prefix: int = 0) -> None:
        self.text = tuple(prediction)
        self._automaton = SuffixAutomaton(self.text[:PREDICTION_CHUNK])
        self._prefix_left = prefix
        self._cursor = Cursor((0,), 0, 0, 0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        known = len(self._automaton)
        for token in self.text[known : known + PREDICTION_CHUNK]:
            self._automaton.append(token)
        before, self._prefix_left = tokens[: self._prefix_left], max(0, self._prefix_left - len(tokens))
        if before:
            self._cursor = self._begin(before, self._cursor)
        for token in tokens[len(before) :]:
            self._cursor = self.step(self._cursor, token)

    def _begin(self, before: Sequence[int], state: Cursor) -> Cursor:
        """The cursor at the start of the output: the beginning of the prediction, or where the end of the prefix occurs in it."""
        suffix, length = state.state, state.length
        for token in before:
            suffix, length = self._automaton.step(suffix, length, token)
        under_way = self._places(suffix, 0)[:1] if length >= LEAST_MATCH else []
        return Cursor(tuple(dict.fromkeys([*under_way, 0])), length if under_way else 0, 0, suffix, length)

    def start(self) -> Cursor:
        return self._cursor

    def step(self, state: Cursor, token: int) -> Cursor:
        suffix, length = self._automaton.step(state.state, state.length, token)
        agreeing = tuple(at + 1 for at in state.at if at < len(self.text) and self.text[at] == token)
        if agreeing:
            return Cursor(agreeing, state.agreed + 1, agreeing[0], suffix, length)
        if length >= LEAST_MATCH:
            at = self._places(suffix, state.reached)[0]
            return Cursor((at,), length, at, suffix, length)
        replaced, inserted = min(state.at[0] + 1, len(self.text)), state.at[0]
        return Cursor((replaced, inserted), 0, state.reached, suffix, length)

    def candidates(self, state: Cursor) -> list[Candidate]:
        """A position is right with estimated probability (n + 1)/(n + 2) after n agreeing tokens; further positions share the rest."""
        scores: dict[int, float] = {}
        share, trust = 1.0, (state.agreed + 1) / (state.agreed + 2)
        for at in state.at:
            if at < len(self.text):
                scores.setdefault(self.text[at], share * trust)
                share *= 1.0 - trust
        return [Candidate(token, score) for token, score in scores.items()]

    def _places(self, state: int, here: int) -> list[int]:
        """Positions after the occurrences of a state: the nearest ahead of `here` first, then those behind."""
        places = [end + 1 for end in self._automaton.ends(state, MOST_PLACES)]
        return sorted(places, key=lambda at: (at < here, abs(at - here)))


class Merged:
    """Several sources as one: the union of their candidates, each token with its best score. Ties: the earlier source first."""

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise ValueError("sources: none; give at least one")
        self.sources = tuple(sources)

    def extend(self, tokens: Sequence[int]) -> None:
        for source in self.sources:
            source.extend(tokens)

    def start(self) -> tuple[Any, ...]:
        return tuple(source.start() for source in self.sources)

    def step(self, state: tuple[Any, ...], token: int) -> tuple[Any, ...]:
        return tuple(source.step(own, token) for source, own in zip(self.sources, state, strict=True))

    def candidates(self, state: tuple[Any, ...]) -> list[Candidate]:
        best: dict[int, float] = {}
        for source, own in zip(self.sources, state, strict=True):
            for token, score in source.candidates(own):
                best[token] = max(score, best.get(token, 0.0))
        return sorted((Candidate(token, score) for token, score in best.items()), key=lambda c: -c.score)


# -- from the name of a drafter to its sources -------------------------------------------------------------------------------

SOURCES = ("ngram", "recycling")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources of a drafter's trees, by their names in SOURCES. name: the setting it was parsed from."""

    name: str
    sources: tuple[str, ...]

    def source(self, law: DraftMode, shared: Successors, prediction: Sequence[int] = (), num_prompt: int = 0) -> Source:
        """A source for a new text. prediction: the output that the client expects after `num_prompt` tokens.

        Under ratio tests (SAMPLED, GREEDY) a text must not read memories that other texts have written: if two requests used the same
        coins, the text of one would depend on coins that the other has still to use. Target matching has no such restriction.
        """
        built: list[Source] = [Prediction(prediction, prefix=num_prompt)] if prediction else []
        if "ngram" in self.sources:
            built.append(Ngram())
        if "recycling" in self.sources:
            built.append(Recycling(Successors(), also=[shared]) if law.ratio else Recycling(shared))
        return built[0] if len(built) == 1 else Merged(built)


MOST_GROUPS = 16  # groups of texts whose memory is kept


class Memories(OrderedDict[Hashable, Successors]):
    """Successors shared by the texts of a group, by group; the least recently used group is evicted."""

    def of(self, group: Hashable) -> Successors:
        memory = self.setdefault(group, Successors())
        self.move_to_end(group)
        if len(self) > MOST_GROUPS:
            self.popitem(last=False)
        return memory


def parse_recipe(spec: str) -> Recipe | None:
    """The recipe that a model setting names: `ngram:`, `recycling:` or `ngram+recycling:`; None if it names something else (a folder, a hub
    name, a table).

    ValueError: a recipe with a mistake; the message is one line and says what to write.
    """
    names, colon, rest = spec.partition(":")
    sources = tuple(names.split("+"))
    if not colon or not set(sources) <= set(SOURCES):
        return None
    if rest or len(set(sources)) < len(sources):
        raise ValueError(
            f"model: {spec!r} names a source twice or more than sources; write {names.split('+')[0]}: or ngram+recycling:"
        )
    return Recipe(spec, sources)
