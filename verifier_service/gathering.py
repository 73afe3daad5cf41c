"""Whether sessions that are ready wait for others that soon will be, so that one step serves them all.

Sessions that draft while others are verified take turns, and stay in turns: each commits when the others have just drafted. With R and W
rows a round of each then lasts s(R) + s(W), however fast the drafter is. Had the ready ones waited once for the d seconds that the others
still needed, all would commit together, draft together, and be ready together from then on: s(R + W) + d a round. So sharing saves

    s(R) + s(W) − s(R + W) − d

for each of them, every round. A step of a large model reads the same weights for any few rows, so the first three terms make nearly
a whole step. The wait is paid now by those that are ready; if they are the many and the others the few, the few will wait instead, a
step later. Drafts are not all equally fast, so what is saved is not believed in full (docs/log.md has the simulations).

Only what is ready and what is due is looked at, and only to wait: more waiting is always allowed (algorithms.md 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WORTH = 2 / 3  # of what sharing saves, so much may be waited


@dataclass(frozen=True, slots=True)
class Due:
    """A session whose tree is awaited: in how many seconds it should be there, with how many rows, at which priority (less is better)."""

    seconds: float
    rows: int
    priority: int = 0


def gathering_s(ready: Sequence[Due], growing: Iterable[Due], step_s: Callable[[int], float], most_rows: int) -> float:
    """How long those that are ready (`seconds` of theirs means nothing) should wait for others; 0: not at all.

    step_s: seconds of a step by its rows; most_rows: of one step. Nobody waits for what is overdue, of worse priority, or would not fit."""
    if not ready:
        return 0.0
    best_s, rows, others = 0.0, sum(one.rows for one in ready), 0
    urgent = min(one.priority for one in ready)
    awaited = sorted(
        (one for one in growing if one.seconds > 0.0 and one.priority <= urgent), key=lambda one: one.seconds
    )
    for num, one in enumerate(awaited, 1):
        others += one.rows
        if rows + others > most_rows:
            break
        saved_s = step_s(rows) + step_s(others) - step_s(rows + others)
        if one.seconds * max(1.0, len(ready) / num) < WORTH * saved_s:
            best_s = one.seconds
    return best_s
