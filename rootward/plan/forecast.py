"""Speed-up by temperature, load and distance: what was measured where a drafter is near, and rounds made longer where it is far.

Rounds with n nodes that take round_s seconds and commit E tokens in each of `load` sessions give load * E / round_s tokens per second. A
distance adds to round_s, a faster draft or cheaper rows take from it, a better draft adds to E.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rootward.plan.measurement import Measured, Run

PAYS = 1.03  # least speed-up that is called one: less is lost in the noise, and a drafter is not worth its processor
DEEPEST = 8  # tokens of a path, as the services draft by default
WORTH_SAYING = 1.05  # of the expected speed: smaller improvements are none


class Change(Enum):
    """One term made as good as it could be; of rejections, half of them gone."""

    DRAFT = "a faster draft"
    ACCEPTANCE = "a better draft"
    DISTANCE = "a nearer drafter"
    ROWS = "cheaper rows"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one temperature, load and distance. Speeds in tokens per second, of all sessions together.

    plain        without speculation
    speedup      with speculation, over `plain`; below 1 where its trials cost speed
    lookup       with n-grams of the text instead of the draft, over `plain`; None if the draft is nothing else
    with_trees   with trees of the best number of nodes in every round, over `plain`; below 1 where trees would cost speed
    nodes        that number, and how many tokens a round of it commits
    changes      speedup if one term were changed
    """

    temperature: float
    load: int
    rtt_ms: float
    plain: float
    speedup: float
    lookup: float | None
    with_trees: float
    nodes: int
    tokens_per_round: float
    changes: dict[Change, float]

    @property
    def speed(self) -> float:
        return self.plain * self.speedup

    @property
    def pays(self) -> bool:
        return self.speedup >= PAYS

    @property
    def helps_most(self) -> Change | None:
        """None: no single change would gain 5 %."""
        best = max(self.changes, key=self.changes.__getitem__)
        return best if self.changes[best] >= WORTH_SAYING * max(1.0, self.speedup) else None


def forecast(measured: Measured, *, rtt_ms: float = 0.0) -> Forecast:
    """rtt_ms: round trip between verifier and drafter that is added to what was measured. Nobody waits for a drafter so far away that
    trees cost speed."""
    added_s = rtt_ms / 1e3
    best = max(measured.trees, key=lambda nodes: _rate(measured, nodes, added_s))
    with_trees = _rate(measured, best, added_s) / measured.plain.rate
    speedup = measured.auto.rate / measured.plain.rate
    lookup = None if measured.lookup is None else measured.lookup.rate / measured.plain.rate
    if rtt_ms:
        speedup = max(with_trees, lookup or 0.0)
        speedup = speedup if speedup >= PAYS else 1.0
    changes = [Change.ACCEPTANCE, Change.ROWS]
    changes += [Change.DRAFT] if any(measured.draft_s(nodes) for nodes in measured.trees) else []
    changes += [Change.DISTANCE] if rtt_ms else []
    return Forecast(
        temperature=measured.temperature,
        load=measured.load,
        rtt_ms=rtt_ms,
        plain=measured.plain.rate,
        speedup=speedup,
        lookup=lookup,
        with_trees=with_trees,
        nodes=best,
        tokens_per_round=measured.trees[best].tokens_per_round,
        changes={
            change: max(_rate(measured, nodes, added_s, change) for nodes in measured.trees) / measured.plain.rate
            for change in changes
        },
    )


def forecasts(measured: Sequence[Measured], *, rtts_ms: Sequence[float]) -> list[Forecast]:
    """Of all measurements at all distances."""
    return [forecast(one, rtt_ms=rtt_ms) for one in measured for rtt_ms in rtts_ms]


def acceptance_by_depth(run: Run) -> list[float]:
    """Share of rounds that accept a node at depth 1, 2, ..."""
    rounds = run.accepted.total()
    return [
        sum(times for accepted, times in run.accepted.items() if accepted >= depth) / rounds
        for depth in range(1, max(run.accepted, default=0) + 1)
    ]


def tokens_with_half_the_rejections(accepted: Counter[int], *, deepest: int) -> float:
    """Tokens per round if a path ended half as often at each depth down to the deepest one."""
    tokens = reached = 1.0
    for depth in range(1, deepest + 1):
        before = sum(times for n, times in accepted.items() if n >= depth - 1)
        after = sum(times for n, times in accepted.items() if n >= depth)
        reached *= (1.0 + after / before) / 2 if before else 0.5
        tokens += reached
    return tokens


def _rate(measured: Measured, nodes: int, added_s: float, change: Change | None = None) -> float:
    """Tokens per second with trees of so many nodes in every round."""
    run = measured.trees[nodes]
    tokens, round_s = run.tokens_per_round, run.round_s + added_s
    if change is Change.ACCEPTANCE:
        tokens = tokens_with_half_the_rejections(run.accepted, deepest=min(nodes, DEEPEST))
    elif change is Change.DRAFT:
        round_s -= measured.draft_s(nodes)
    elif change is Change.ROWS:
        round_s -= measured.row_s(nodes)
    elif change is Change.DISTANCE:
        round_s -= added_s
    return run.load * tokens / round_s
