"""The same numbers under vLLM's names."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics as GatewayMetrics
from rootward.metrics import RENAMED, SAME, VllmNames
from verifier_service.metrics import GAUGES
from verifier_service.metrics import Metrics as VerifierMetrics


def test_names_labels_and_values() -> None:
    source, target = CollectorRegistry(), CollectorRegistry()
    Gauge("rootward_kv_cache_usage_ratio", "Share.", registry=source).set(0.25)
    Counter("rootward_request_success", "Ended.", ["finished_reason"], registry=source).labels("stop").inc(3)
    Histogram("rootward_time_to_first_token_seconds", "First.", registry=source, buckets=(1,)).observe(0.5)
    Counter("rootward_redispatch", "Ours alone.", registry=source).inc()
    target.register(VllmNames(source, "m"))
    text = generate_latest(target).decode()
    samples = {
        (s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert samples["vllm:kv_cache_usage_perc", ("model_name", "m")] == 0.25
    assert samples["vllm:request_success_total", ("finished_reason", "stop"), ("model_name", "m")] == 3
    assert samples["vllm:time_to_first_token_seconds_bucket", ("le", "1.0"), ("model_name", "m")] == 1
    assert samples["vllm:time_to_first_token_seconds_count", ("model_name", "m")] == 1
    assert "redispatch" not in text


def test_every_name_is_exported_by_a_service() -> None:
    ours = {name.removesuffix("_total") for name in GAUGES}
    for registry in (GatewayMetrics().registry, VerifierMetrics().registry):
        ours |= {family.name.removeprefix("rootward_") for family in registry.collect()}
    assert (SAME | RENAMED.keys()) <= ours
