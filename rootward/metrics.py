"""Metrics for Prometheus under our names; collectors of values that are read at every scrape, of several models, and under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Read = Callable[[], Mapping[str, float | Mapping[str, float]]]

PREFIX = "rootward_"
VLLM_PREFIX = "vllm:"
RENAMED = {"kv_cache_usage_ratio": "kv_cache_usage_perc"}
SAME = {
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
}


def counter(registry: CollectorRegistry, name: str, meaning: str, *labels: str) -> Counter:
    """A new counter; its name is without the prefix `rootward_`."""
    return Counter(PREFIX + name, meaning, labels, registry=registry)


def histogram(
    registry: CollectorRegistry, name: str, meaning: str, buckets: Sequence[float], *labels: str
) -> Histogram:
    """A new histogram; its name is without the prefix `rootward_`."""
    return Histogram(PREFIX + name, meaning, labels, registry=registry, buckets=buckets)


class Gauges(Collector):
    """Names (without the prefix `rootward_`; counters end in `_total`) → values, read at every scrape: one for each metric, or one for each
    drafter by its address."""

    def __init__(self, registry: CollectorRegistry, meanings: Mapping[str, str], read: Read) -> None:
        self._meanings = meanings
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        values = self._read()
        for name, meaning in self._meanings.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            value = values[name]
            if not isinstance(value, Mapping):
                yield kind(PREFIX + name, meaning, value=value)
                continue
            family = kind(PREFIX + name, meaning, labels=["drafter"])
            for drafter, own in value.items():
                family.add_metric([drafter], float(own))
            yield family


@dataclass(frozen=True, slots=True, eq=False)
class ByModel(Collector):
    """The metrics of several models, each sample with its label `model_name`. To be registered in a registry of its own."""

    sources: Mapping[str, CollectorRegistry]

    def collect(self) -> Iterator[Metric]:
        made: dict[str, Metric] = {}
        for model, source in self.sources.items():
            for of in source.collect():
                family = made.setdefault(of.name, Metric(of.name, of.documentation, of.type, of.unit))
                _add_samples(family, of, model)
        yield from made.values()


@dataclass(frozen=True, slots=True)
class VllmNames(Collector):
    """Metrics of `source` whose meaning is vLLM's, once more under vLLM's names and with its label `model_name`, for dashboards and routers
    that look for those. Only names and shapes change. To be registered in a registry of its own; reads `source` at every scrape."""

    source: CollectorRegistry
    model_name: str

    def collect(self) -> Iterator[Metric]:
        for family in self.source.collect():
            name = family.name.removeprefix(PREFIX)
            if family.name.startswith(PREFIX) and (name in SAME or name in RENAMED):
                renamed = VLLM_PREFIX + RENAMED.get(name, name)
                made = Metric(renamed, family.documentation, family.type, family.unit)
                _add_samples(made, family, self.model_name)
                yield made


def _add_samples(made: Metric, source: Metric, model_name: str) -> None:
    """Add the samples of `source`, under the name of `made`. Their label `model_name` is kept if they have one."""
    for sample in source.samples:
        name = made.name + sample.name.removeprefix(source.name)
        made.add_sample(name, {"model_name": model_name, **sample.labels}, sample.value, sample.timestamp)
