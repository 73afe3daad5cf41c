"""What the speculation controller makes of measured rounds: the forecast is its own decision, by its own functions.

For every temperature, load and distance a controller is given the step times and the rounds that were measured, and decides. What would
help is asked in the same way: of the same rounds with one of the four terms changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from random import Random

from verifier_service.plan.measurement import Measured
from verifier_service.speculation import ENTER, RoundResult, SpeculationController, Statistics, StepTime

WORTH_SAYING = 1.05  # of the expected speed: smaller improvements are none


class Change(Enum):
    """One term of the goodput made as good as it could be; of rejections, half of them gone."""

    DRAFT = "a faster draft"
    ACCEPTANCE = "a better draft"
    DISTANCE = "a nearer drafter"
    ROWS = "cheaper rows"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one temperature, load and distance. Speeds in tokens per second, of all sessions together.

    speedup      over plain decoding of the same service, which is what it does where trees do not pay
    with_trees   tokens per second of the best number of nodes over plain decoding, below 1 where trees would cost speed
    nodes        that number, and how many tokens a round of it commits
    changes      speedup if one term were changed
    """

    temperature: float
    load: int
    rtt_ms: float
    plain: float
    speedup: float
    with_trees: float
    nodes: int
    tokens_per_round: float
    changes: dict[Change, float]

    @property
    def speed(self) -> float:
        return self.plain * self.speedup

    @property
    def pays(self) -> bool:
        return self.speedup > 1.0

    @property
    def helps_most(self) -> Change | None:
        """None: no single change would gain 5 %."""
        best = max(self.changes, key=self.changes.__getitem__, default=None)
        return best if best is not None and self.changes[best] >= WORTH_SAYING * self.speedup else None


def forecast(measured: Measured, *, temperature: float, load: int, rtt_ms: float = 0.0) -> Forecast:
    """rtt_ms: round trip between verifier and drafter; of no account where the draft is in the verifier."""
    rtt_ms = rtt_ms if measured.remote else 0.0
    decided = _decided(measured, temperature, load, rtt_ms)
    changes = [Change.ACCEPTANCE, Change.ROWS]
    changes += [Change.DRAFT] if any(cell.draft_s for cell in measured.cells) else []
    changes += [Change.DISTANCE] if rtt_ms else []
    return Forecast(
        temperature=temperature,
        load=load,
        rtt_ms=rtt_ms,
        plain=load / measured.step_s(temperature, load, 0),
        speedup=_expected(measured, decided),
        with_trees=decided.speedup,
        nodes=decided.usual_nodes,
        tokens_per_round=decided.usual_tokens,
        changes={one: _expected(measured, _decided(measured, temperature, load, rtt_ms, one)) for one in changes},
    )


def forecasts(measured: Measured, *, loads: Sequence[int], rtts_ms: Sequence[float]) -> list[Forecast]:
    """Of all combinations, with one distance where that is of no account."""
    return [
        forecast(measured, temperature=temperature, load=load, rtt_ms=rtt_ms)
        for temperature in measured.temperatures
        for load in loads
        for rtt_ms in (rtts_ms if measured.remote else [0.0])
    ]


def acceptance(measured: Measured, temperature: float) -> list[float]:
    """Probability that a node is accepted, by its number in draw order from 1, as the controller has learned it."""
    known = _decided(measured, temperature, measured.loads[0], 0.0)
    tokens = known.tokens(measured.most)
    return [after - before for before, after in pairwise(tokens)]


def acceptance_by_depth(measured: Measured, temperature: float) -> list[float]:
    """Share of rounds of the largest trees that accept a node at depth 1, 2, ..."""
    cells = [cell for cell in measured.cells if (cell.temperature, cell.nodes) == (temperature, measured.most)]
    lengths = [len(verdict.path) for cell in cells for verdict in cell.verdicts]
    return [sum(n >= depth for n in lengths) / len(lengths) for depth in range(1, max(lengths, default=0) + 1)]


def _expected(measured: Measured, decided: Statistics) -> float:
    """The speed-up that a user sees: a drafter is left where the controller would not enter. Trees of the verifier itself need no
    such margin: rounds without one decode plainly."""
    threshold = ENTER if measured.remote else 1.0
    return decided.speedup if decided.speedup > threshold else 1.0


def _decided(
    measured: Measured, temperature: float, load: int, rtt_ms: float, change: Change | None = None
) -> Statistics:
    """Statistics of the rounds of this temperature, after a plan for `load` sessions."""
    step_s = {nodes: measured.step_s(temperature, load, nodes) for nodes in measured.sizes}
    if change is Change.ROWS:
        step_s = dict.fromkeys(step_s, step_s[0])
    controller = SpeculationController(StepTime({load * (nodes + 1): step_s[nodes] for nodes in step_s}))
    statistics = controller.of((temperature, load, rtt_ms))
    for result in _results(measured, temperature, load, rtt_ms, change):
        statistics.add(0, result)
    controller.plan({statistics: load}, most=measured.most)
    return statistics


def _results(
    measured: Measured, temperature: float, load: int, rtt_ms: float, change: Change | None
) -> list[RoundResult]:
    """Acceptance depends on the text alone, so the rounds of all loads count. In shuffled order, for the controller forgets."""
    way_s = measured.hop_s + (0.0 if change is Change.DISTANCE else rtt_ms / 1e3)
    found = []
    for cell in measured.cells:
        if cell.temperature != temperature or not cell.nodes:
            continue
        drafting_s = 0.0 if change is Change.DRAFT else measured.draft_s(temperature, load, cell.nodes)
        wait_s = drafting_s + way_s
        found += [RoundResult(cell.nodes, cell.nodes, one.path, wait_s) for one in cell.verdicts]
        if change is Change.ACCEPTANCE:
            found += [RoundResult(cell.nodes, cell.nodes, one.longest, wait_s) for one in cell.verdicts]
    Random(0).shuffle(found)
    return found
