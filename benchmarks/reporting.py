"""What was measured, as values; and bootstrap intervals over contexts.

Legend: C contexts, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.ranked import Floats

NUM_RESAMPLES, CONFIDENCE = 2000, 0.95
AGREE_WITHIN = 4.0  # standard errors between measured and closed form


@dataclass(frozen=True)
class Cell:
    """One (temperature, budget, construction, rule).

    samples      float64[C]  closed-form tokens of a round at each context, bonus included (`Outcome.reach`)
    given_trees  mean of the closed form given the whole trees (`Law.block_efficiency`): what verdicts are held against
    survival     float64[D]  P(at least d draft tokens are accepted), d = 0, 1, …
    measured     mean tokens of the drawn verdicts; measured_error its standard error given the trees
    nodes, levels  mean nodes below the root and mean depth of the trees (= draft forwards level by level)
    """

    temperature: float
    budget: int
    construction: str
    rule: str
    baseline: bool
    samples: Floats
    given_trees: float
    survival: Floats
    measured: float
    measured_error: float
    num_measured: int
    nodes: float
    levels: float

    @property
    def name(self) -> str:
        return f"{self.construction} + {self.rule}"

    @property
    def efficiency(self) -> float:
        """Block efficiency: tokens a round, the bonus token included."""
        return float(self.samples.mean())

    @property
    def z(self) -> float:
        """(measured − closed form given the trees) in standard errors; 0 where both are certain and equal."""
        difference = self.measured - self.given_trees
        if abs(difference) < 1e-9:
            return 0.0
        return difference / self.measured_error if self.measured_error > 0 else float(np.sign(difference) * np.inf)

    @property
    def agrees(self) -> bool:
        return abs(self.z) <= AGREE_WITHIN

    def as_json(self) -> dict[str, Any]:
        low, high = interval(self.samples)
        return {
            "temperature": self.temperature,
            "budget": self.budget,
            "construction": self.construction,
            "rule": self.rule,
            "baseline": self.baseline,
            "block_efficiency": round(self.efficiency, 6),
            "ci_low": round(low, 6),
            "ci_high": round(high, 6),
            "given_trees": round(self.given_trees, 6),
            "measured": round(self.measured, 6),
            "measured_error": round(self.measured_error, 6),
            "num_measured": self.num_measured,
            "z": round(self.z, 3) if np.isfinite(self.z) else None,
            "agrees": self.agrees,
            "nodes": round(self.nodes, 3),
            "levels": round(self.levels, 3),
            "survival": [round(float(x), 5) for x in self.survival],
        }


@dataclass(frozen=True)
class LevelCell:
    """Growth under a limit of draft forwards: tokens a round after so many levels of so many draws."""

    temperature: float
    law: str
    acceptance: float | None  # None: scored by path probability
    family: int
    draws_per_level: int
    levels: int
    nodes: float
    samples: Floats

    @property
    def efficiency(self) -> float:
        return float(self.samples.mean())

    def as_json(self) -> dict[str, Any]:
        low, high = interval(self.samples)
        return {
            "temperature": self.temperature,
            "law": self.law,
            "acceptance": self.acceptance,
            "family": self.family,
            "draws_per_level": self.draws_per_level,
            "levels": self.levels,
            "nodes": round(self.nodes, 3),
            "block_efficiency": round(self.efficiency, 6),
            "ci_low": round(low, 6),
            "ci_high": round(high, 6),
        }


@dataclass(frozen=True)
class Results:
    """A whole run."""

    metadata: dict[str, Any]
    cells: list[Cell]
    level_cells: list[LevelCell] = field(default_factory=list)

    def select(self, **wanted: Any) -> list[Cell]:
        """Cells whose fields have these values."""
        return [cell for cell in self.cells if all(getattr(cell, k) == v for k, v in wanted.items())]

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell.temperature for cell in self.cells})

    @property
    def budgets(self) -> list[int]:
        return sorted({cell.budget for cell in self.cells})


def merged_cells(parts: Sequence[Sequence[Cell]]) -> list[Cell]:
    """The cells of several groups of contexts, each group a whole grid in the same order."""
    return [_merged(same) for same in zip(*parts, strict=True)]


def merged_levels(parts: Sequence[Sequence[LevelCell]]) -> list[LevelCell]:
    return [
        replace(
            same[0],
            samples=np.concatenate([cell.samples for cell in same]),
            nodes=float(np.average([cell.nodes for cell in same], weights=[len(cell.samples) for cell in same])),
        )
        for same in zip(*parts, strict=True)
    ]


def _merged(same: Sequence[Cell]) -> Cell:
    """One cell over all contexts: means weighted by contexts or by verdicts."""
    contexts, verdicts = [len(cell.samples) for cell in same], [cell.num_measured for cell in same]
    deepest = max(len(cell.survival) for cell in same)
    survival = [np.pad(cell.survival, (0, deepest - len(cell.survival))) for cell in same]
    variance = sum((cell.measured_error * num) ** 2 for cell, num in zip(same, verdicts, strict=True))
    return replace(
        same[0],
        samples=np.concatenate([cell.samples for cell in same]),
        given_trees=float(np.average([cell.given_trees for cell in same], weights=contexts)),
        survival=np.average(survival, axis=0, weights=contexts),
        measured=float(np.average([cell.measured for cell in same], weights=verdicts)),
        measured_error=float(np.sqrt(variance)) / sum(verdicts),
        num_measured=sum(verdicts),
        nodes=float(np.average([cell.nodes for cell in same], weights=contexts)),
        levels=float(np.average([cell.levels for cell in same], weights=contexts)),
    )


def interval(samples: Floats) -> tuple[float, float]:
    """A bootstrap interval of the mean over contexts."""
    means = samples[_resampled(len(samples))].mean(axis=1)
    return _quantiles(means)


def ratio(above: Floats, below: Floats) -> tuple[float, float, float]:
    """(ratio of the means, interval), contexts resampled in pairs."""
    index = _resampled(len(above))
    ratios = above[index].mean(axis=1) / below[index].mean(axis=1)
    return float(above.mean() / below.mean()), *_quantiles(ratios)


def _resampled(num: int) -> np.ndarray:
    return np.random.default_rng(0).integers(num, size=(NUM_RESAMPLES, num))


def _quantiles(values: Floats) -> tuple[float, float]:
    edge = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(values, [edge, 1.0 - edge])
    return float(low), float(high)
