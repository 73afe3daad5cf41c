"""Numbers that a service knows anyway, exported as metrics when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Read = Callable[[], Mapping[str, float]]


class Readings(Collector):
    """Names (without the prefix `rootward_`; counters end in `_total`) → values, read at every scrape."""

    def __init__(self, registry: CollectorRegistry, meanings: Mapping[str, str], read: Read) -> None:
        self._meanings, self._read = meanings, read
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        values = self._read()
        for name, meaning in self._meanings.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"rootward_{name}", meaning, value=values[name])

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # nothing is read at registration: the service is not complete yet
