"""How messages that wait become one: a slow link joins them, it never replaces one or drops one from the middle.

So whatever a link is doing, it holds at most one message per slot and base, and what is held is bounded by the node cap.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rootward.core.frames import Commit, Grow, Open


def opened_at(message: Open, commit: Commit) -> Open:
    """The tree may as well begin where the truth is by now."""
    budget = message.node_budget if commit.node_budget is None else commit.node_budget
    return replace(message, prefix=(*message.prefix, *commit.tokens), node_budget=budget)


def cumulative(earlier: Commit, later: Commit) -> Commit:
    """One commit that says both; `later` begins where `earlier` ends."""
    return replace(
        later,
        base_len=earlier.base_len,
        tokens=(*earlier.tokens, *later.tokens),
        runs=tuple(len(run) for commit in (earlier, later) for run in commit.rounds),
        node_budget=earlier.node_budget if later.node_budget is None else later.node_budget,
    )


def joined(earlier: Grow, later: Grow) -> Grow | None:
    """One frame with the nodes of both. None: they are of two bases, or not neighbours."""
    same_base = (earlier.base_len, earlier.base_hash) == (later.base_len, later.base_hash)
    if not same_base or later.first_node != earlier.first_node + len(earlier.token):
        return None
    return replace(
        later,
        first_node=earlier.first_node,
        parent=np.concatenate([earlier.parent, later.parent]),
        token=np.concatenate([earlier.token, later.token]),
        sampled=np.concatenate([earlier.sampled, later.sampled]),
        rows={**earlier.rows, **later.rows},
        draft_us=earlier.draft_us + later.draft_us,
        guess=None if earlier.guess is later.guess is None else np.concatenate([earlier.guesses, later.guesses]),
    )
