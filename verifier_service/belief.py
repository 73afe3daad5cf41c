"""What is believed of numbers of which only weighted sums are seen, with noise: a Kalman filter (R. E. Kalman, 1960)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

SURPRISE = 2.0  # an observation is one that is further off than so many standard deviations, and counts as one that is so far off


class Belief:
    """mean: float64[N]; covariance: float64[N, N]. A number is known by its index, in the order in which they were added."""

    def __init__(self) -> None:
        self.mean = np.zeros(0)
        self.covariance = np.zeros((0, 0))
        self._most, self._drift = np.zeros(0), np.zeros(0)

    def add(
        self, like: Mapping[int, float], doubt: float, drift: float, *, more: float = 0.0, most: float | None = None
    ) -> int:
        """A further number, expected at a weighted sum of others and so much more; its index.

        doubt  standard deviation around that sum
        drift  standard deviation of its change in a step of time
        most   the largest standard deviation that drifting leads to (None: what it has now)
        """
        size, weights = len(self.mean), np.zeros(len(self.mean))
        for index, weight in like.items():
            weights[index] = weight
        covariance = np.zeros((size + 1, size + 1))
        covariance[:size, :size] = self.covariance
        covariance[size, :size] = covariance[:size, size] = self.covariance @ weights
        covariance[size, size] = weights @ self.covariance @ weights + doubt**2
        self.mean, self.covariance = np.append(self.mean, weights @ self.mean + more), covariance
        self._most = np.append(self._most, covariance[size, size] ** 0.5 if most is None else most)
        self._drift = np.append(self._drift, drift)
        return size

    def forget(self, index: int) -> None:
        """This number may be anything again, within the most that it is ever doubted."""
        self.covariance[index, :] = self.covariance[:, index] = 0.0
        self.covariance[index, index] = self._most[index] ** 2

    def observe(
        self, weights: Mapping[int, float], value: float, noise: float, jumps: Mapping[int, float] | None = None
    ) -> None:
        """The weighted sum of these numbers was seen as `value`; noise: standard deviation. Where that is a surprise, those in `jumps`
        may have changed at once, by about so much."""
        index, weight = list(weights), np.array(list(weights.values()))
        error = value - float(weight @ self.mean[index])
        limit = SURPRISE * (float(weight @ self.covariance[np.ix_(index, index)] @ weight) + noise**2) ** 0.5
        if abs(error) > limit:
            error = math.copysign(limit, error)
            for number, jump in (jumps or {}).items():
                self.covariance[number, number] += jump**2
        shares = self.covariance[:, index] @ weight
        variance = float(weight @ shares[index]) + noise**2
        self.mean += shares * (error / variance)
        self.covariance -= np.outer(shares, shares) / variance

    def pass_on(self) -> None:
        """A step of time: the numbers have drifted."""
        size = len(self.mean)
        self.covariance.flat[:: size + 1] += self._drift**2
        spread = np.sqrt(self.covariance.diagonal())
        if (spread > self._most).any():
            shrink = np.where(spread > self._most, self._most / np.maximum(spread, 1e-12), 1.0)
            self.covariance *= np.outer(shrink, shrink)
