"""Who gets the rows of a level, and the places of a full drafter: verifiers alike, then the tenants of each, then their sessions.

What one does not want the others share. Nothing here looks at a tree's values: how much a session grows, and when, may follow the load.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

UNFAIR = 2  # trees that the fullest verifier must hold more than the one that asks, before it gives one up


def max_min(wants: Sequence[int], total: int) -> list[int]:
    """Whole shares of `total`: nobody gets more than it wants, and nobody less than another unless it wants less."""
    shares, left = [0] * len(wants), total
    for served, i in enumerate(sorted(range(len(wants)), key=lambda i: wants[i])):
        shares[i] = min(wants[i], left // (len(wants) - served))
        left -= shares[i]
    return shares


def dealt(wants: Sequence[int], owners: Sequence[tuple[Hashable, ...]], rows: int) -> list[int]:
    """Rows for each tree that wants some. owners: (verifier, tenant) of each; those alike at one level share alike.

    Whoever wants rows gets one: a level may exceed `rows` by that.
    """
    shares = _dealt(list(range(len(wants))), wants, owners, rows)
    return [max(share, min(want, 1)) for share, want in zip(shares, wants, strict=True)]


def _dealt(
    members: list[int], wants: Sequence[int], owners: Sequence[tuple[Hashable, ...]], rows: int, depth: int = 0
) -> list[int]:
    shares = [0] * len(wants)
    if not members:
        return shares
    if depth == len(owners[members[0]]):
        for i, share in zip(members, max_min([wants[i] for i in members], rows), strict=True):
            shares[i] = share
        return shares
    groups: dict[Hashable, list[int]] = {}
    for i in members:
        groups.setdefault(owners[i][depth], []).append(i)
    totals = max_min([sum(wants[i] for i in group) for group in groups.values()], rows)
    for group, total in zip(groups.values(), totals, strict=True):
        for i, share in enumerate(_dealt(group, wants, owners, total, depth + 1)):
            shares[i] += share
    return shares


def gives_up(held: Mapping[T, int], asking: T) -> T | None:
    """The verifier that gives up a tree so that another can open one on a full drafter; None: it is fair as it is."""
    fullest = max(held, key=lambda one: held[one], default=None)
    if fullest is None or held[fullest] < held.get(asking, 0) + UNFAIR:
        return None
    return fullest
