"""Trees that a draft head grows in the verifier's process, from the hidden states of the target's own forwards.

Runs on the model's thread. After a forward of the target the states of its committed rows are kept (`observe`). Before the next one the
trees of all rounds that want one are grown together (`grow`), with one forward of the head per level. The number of nodes of a tree was
fixed when its round began. If states are missing (of a prefix found in the KV cache), the head's text only begins later.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.frames import Commit, Features, extend_hash
from rootward.core.growth import BestFirst
from rootward.core.living_tree import Snapshot
from rootward.engine.grower import Grower
from rootward.ports import TreeToGrow

if TYPE_CHECKING:  # a verifier without a head loads none
    from rootward.engine.head_model import DraftHead

MOST_POSITIONS = 1024  # that a head reads at once: of a longer prompt the last ones
MAX_CATCH_UP_STEPS = 4  # in a row; sessions that begin together get their first trees in two or three steps
LEAST_LEVELS = 3  # of a tree: a level costs about a tenth of a step of a small target (docs/log.md, lesson 23)


@dataclass(slots=True)
class Observed:
    """States of positions first, first + 1, ... of a session's text."""

    first: int
    end: int  # after the last one
    parts: list[torch.Tensor]


class TextFeatures:
    """Fused features of the last positions of a session's text that the target has run, at most `most`, for drafters with a head."""

    def __init__(self, most: int) -> None:
        self.most, self.end = most, 0  # the position after the last one
        self._rows: NDArray[np.float32] = np.zeros((0, 0), np.float32)

    def add(self, first: int, rows: NDArray[np.float32]) -> None:
        """Add the features of positions first, first + 1, … Earlier ones are dropped if there is a gap between them."""
        known = self._rows if self.end == first and len(self._rows) else rows[:0]
        self._rows, self.end = np.concatenate([known, rows])[-self.most :], first + len(rows)

    def before(self, length: int, num_tokens: int) -> NDArray[np.float32] | None:
        """float32[n, size], n at most num_tokens: features of the positions before each of the last tokens of a text of this length. None:
        those of the last token are missing."""
        rows = self._rows[-num_tokens:]
        return rows if len(rows) and self.end == length - 1 else None


class HeadDrafts:
    """Trees of a draft head for all sessions of a verifier. best_first: how they grow (default: in LEAST_LEVELS levels or more)."""

    def __init__(self, model: DraftHead, *, incarnation: int, best_first: BestFirst | None = None) -> None:
        self.model = model
        self.most_positions = min(model.window or MOST_POSITIONS, MOST_POSITIONS)
        shape = best_first or BestFirst(least_levels=LEAST_LEVELS)
        self._grower: Grower[Hashable] = Grower(model, incarnation=incarnation, best_first=shape)
        from rootward.engine.head_growth import compiled_trees  # a verifier without a head loads none

        self._compiled = compiled_trees(model, incarnation=incarnation, best_first=shape)
        self._observed: dict[Hashable, Observed] = {}
        # The last `grow` took longer than usual: it read a text of more than one round (a prompt, rounds without trees), as at most
        # MAX_CATCH_UP_STEPS calls in a row did. Where more of them do, that is the usual time.
        self.catches_up = False
        self._num_reading = 0  # number of calls in a row, up to the last one, that read such a text

    def observe(self, session: Hashable, first: int, states: torch.Tensor) -> None:
        """Keep the states [n, S] of positions first, first + 1, ... Earlier ones are dropped if there is a gap between them."""
        known = self._observed.get(session)
        if known is None or known.end != first:
            self.forget(session)
            known = self._observed[session] = Observed(first, first, [])
        known.parts.append(states)
        known.end += len(states)
        if known.end - known.first >= 2 * self.most_positions:  # not with every token: they are copied
            self._keep_last_positions(session)

    def grow(self, wanted: Sequence[TreeToGrow]) -> list[Snapshot | None]:
        """A tree for each, None where states of the end of the text are missing."""
        known = [one for one in wanted if self._has_states(one)]
        features = self._features(known)
        read_much = any(len(rows) > one.nodes + 1 for one, rows in zip(known, features, strict=True))
        self._num_reading = self._num_reading + 1 if read_much else 0
        self.catches_up = 0 < self._num_reading <= MAX_CATCH_UP_STEPS
        compiled: list[tuple[TreeToGrow, NDArray[np.float32]]] = []
        others: list[TreeToGrow] = []
        for one, rows in zip(known, features, strict=True):
            if self._compiled is not None and self._compiled.takes(one.session, one.opening):
                compiled.append((one, rows))
            elif self._extend_text(one, rows):
                others.append(one)
        trees = {} if self._compiled is None else self._compiled.grow(compiled)
        self._grower.grow([one.session for one in others])
        trees |= {one.session: self._grower.trees[one.session].tree.snapshot(one.nodes) for one in others}
        return [trees.get(one.session) for one in wanted]

    def forget(self, session: Hashable) -> None:
        """The session has ended, or states of its text are missing."""
        self._grower.close(session)
        if self._compiled is not None:
            self._compiled.forget(session)
        self._observed.pop(session, None)

    def _has_states(self, one: TreeToGrow) -> bool:
        """The states before the last token of the text are there."""
        known = self._observed.get(one.session)
        return known is not None and known.end == len(one.text) - 1

    def _keep_last_positions(self, session: Hashable) -> None:
        """Drop the states of positions before the last `most_positions`. The head's text begins anew if any are dropped."""
        known = self._observed[session]
        if known.end - known.first > self.most_positions:
            last = torch.cat(known.parts)[-self.most_positions :].clone()
            self.forget(session)
            self._observed[session] = Observed(known.end - self.most_positions, known.end, [last])

    def _features(self, wanted: Sequence[TreeToGrow]) -> list[NDArray[np.float32]]:
        """Fused features of the states that the head has not read, all of them in one product."""
        if not wanted:
            return []
        for one in wanted:
            self._keep_last_positions(one.session)
        observed = [self._observed[one.session] for one in wanted]
        parts = [part for known in observed for part in known.parts]
        fused = self.model.fuse(parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().numpy()
        ends = np.cumsum([known.end - known.first for known in observed]).tolist()
        for known in observed:
            known.first, known.parts = known.end, []
        return [fused[first:end] for first, end in zip([0, *ends], ends, strict=False)]

    def _extend_text(self, one: TreeToGrow, rows: NDArray[np.float32]) -> bool:
        """Bring the head's text to the end of the session's, with these features of its last tokens. False: no slot is free."""
        text, features = one.text, Features(rows)
        growing = self._grower.trees.get(one.session)
        if growing is None:
            opening = replace(one.opening, prefix=tuple(text), num_features=len(rows), node_budget=one.nodes)
            if self._grower.open(one.session, opening) is not None:
                return False
            for part in features.chunks(opening.slot, len(text)):
                self._grower.add_features(one.session, part)
            return True
        tree = growing.tree
        tokens, hash_after = tuple(text[tree.length :]), tree.hash
        for token in tokens:
            hash_after = extend_hash(hash_after, token)
        message = Commit(growing.open.slot, tree.length, tokens, hash_after, node_budget=one.nodes, features=features)
        self._grower.commit(one.session, message)
        return True
