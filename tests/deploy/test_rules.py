"""Recording, alert and adapter rules: valid, right on the golden cases, and about metrics that exist."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from support.helm import CHART, REGISTRY, ROOT, of_kind, parsed

from drafter_service.metrics import GAUGES as OF_DRAFTER
from gateway.metrics import GAUGES as OF_GATEWAY
from gateway.metrics import CallMetrics
from gateway.metrics import Metrics as GatewayMetrics
from gateway.resuming import StreamInterrupted
from rootward.core.audit import Draws
from rootward.demand import DemandCollector, DrafterDemand, VerifierDemand
from rootward.errors import InvalidRequest, Overloaded, RateLimited, ServiceError, Unavailable
from rootward.metrics import Gauges
from verifier_service.audit import DrafterAudit
from verifier_service.metrics import GAUGES as OF_VERIFIER
from verifier_service.metrics import Metrics as VerifierMetrics

RULES = CHART / "files" / "rules"
CASES = Path(__file__).parent / "rules"
NAME = re.compile(r"\brootward_[a-z0-9_]+")


@pytest.fixture(scope="session")
def promtool():
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("NO PROMTOOL: the rules are not tested; install Debian's package prometheus")
    return binary


def rule_files():
    return [RULES / "drafter.yaml", RULES / "alerts.yaml"]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_rules_are_valid(promtool):
    done = run(promtool, "check", "rules", "--lint=all", *map(str, rule_files()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cases", ["drafter_test.yaml", "alerts_test.yaml"])
def test_rules_compute_what_they_must(promtool, cases):
    done = run(promtool, "test", "rules", str(CASES / cases))
    assert done.returncode == 0, done.stdout + done.stderr


RELEASES = "monitoring: {rules: {enabled: true}}"


def computed(
    helm, promtool, folder, release: str, values: str, series: dict[str, int], expected: dict[str, dict[str, int]]
):
    """AssertionError unless the rules of a release, as rendered, compute what is expected: expression → {labels: value}."""
    flags = ("-n", "n", "-f", "-", "--set", f"global.imageRegistry={REGISTRY}")
    done = helm.run("template", release, str(CHART), *flags, stdin=values)
    assert done.returncode == 0, done.stderr
    rendered = [o["spec"] for o in parsed(done.stdout) if o["kind"] == "PrometheusRule"]
    files = [folder / f"{n}.yaml" for n in range(len(rendered))]
    for path, spec in zip(files, rendered, strict=True):
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    checked = run(promtool, "check", "rules", "--lint=all", *map(str, files))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": f"{value}x9"} for name, value in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": "1m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
            }
            for expression, samples in expected.items()
        ],
    }
    suite = {"rule_files": [str(path) for path in files], "evaluation_interval": "15s", "tests": [test]}
    (folder / "test.yaml").write_text(yaml.safe_dump(suite), encoding="utf-8")
    done = run(promtool, "test", "rules", str(folder / "test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("release", "sessions"), [("a", 60), ("b", 0)])
def test_rules_of_a_release_record_its_series_alone(helm, promtool, tmp_path, release, sessions):
    """As rendered, with two releases in the namespace and one of the same name elsewhere."""
    of = {'namespace="n",release="a"': 60, 'namespace="n",release="b"': 0, f'namespace="o",release="{release}"': 7}
    series = {f'rootward_speculating_sessions{{{labels},pool="p"}}': value for labels, value in of.items()}
    labels = f'rootward:speculating_sessions{{namespace="n",release="{release}",pool="p"}}'
    expected = {"rootward:speculating_sessions": {labels: sessions}}
    computed(helm, promtool, tmp_path, release, RELEASES, series, expected)


def test_signals_of_verifiers_have_the_name_of_their_model(helm, promtool, tmp_path):
    """That of the values, which a label of Kubernetes can have: what clients call a model has a slash as often as not."""
    values = f"{RELEASES}\nmodels: [{{name: a}}, {{name: b, servedModelName: x/b}}]"
    own = 'namespace="n",release="r"'
    series = {}
    for model, running, waiting in (("a", 5, 2), ("x/b", 3, 0)):
        verifier = f'{{{own},model_name="{model}",pod="v-{model}"}}'
        series[f"rootward_num_requests_running{verifier}"] = running
        series[f"rootward_num_requests_waiting{verifier}"] = 0
        series[f"rootward_kv_cache_usage_ratio{verifier}"] = 1
        series[f'rootward_num_requests_waiting{{{own},model_name="{model}",pod="g"}}'] = waiting
    samples = {
        f'rootward:verifier_sessions{{{own},model="{name}",model_name="{model}"}}': value
        for name, model, value in (("a", "a", 7), ("b", "x/b", 3))
    }
    computed(helm, promtool, tmp_path, "r", values, series, {"rootward:verifier_sessions": samples})


def test_a_wrong_formula_is_noticed(promtool, tmp_path):
    """Utilisation in place of demand: the golden cases refuse it."""
    text = (RULES / "drafter.yaml").read_text(encoding="utf-8")
    wrong = text.replace("* rootward:drafter_row_seconds / rootward:round_base_seconds", "* rootward:drafter_rows_busy")
    assert wrong != text
    (tmp_path / "drafter.yaml").write_text(wrong, encoding="utf-8")
    cases = yaml.safe_load((CASES / "drafter_test.yaml").read_text(encoding="utf-8"))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(cases | {"rule_files": ["drafter.yaml"]}), encoding="utf-8")
    assert run(promtool, "test", "rules", str(tmp_path / "test.yaml")).returncode == 1


def alerts():
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_cost_of_the_page_is_that_of_the_tokens(promtool, tmp_path):
    """Two verifiers at 10.00 and four drafters at 0.70 an hour, 60 rounds and 40 accepted drafts a second: 100 tokens a second."""
    page = (ROOT / "docs" / "operations" / "sizing.md").read_text(encoding="utf-8")
    query = re.sub(r"#.*", "", re.search(r"```promql\n(.*?)```", page, re.S)[1])
    query = query.replace("p_verifier", "10").replace("p_drafter", "0.7")
    counters = {
        "rounds_total{kind='tree'": 600,
        "rounds_total{kind='plain'": 300,
        "num_accepted_tokens_total{pod='v0'": 600,
    }
    series = [(f"rootward_spec_decode_{name},namespace='llm'}}", f"0+{step}x480") for name, step in counters.items()]
    series += [(f"rootward_kv_cache_usage_ratio{{namespace='llm',pod='v{n}'}}", "0.5x480") for n in range(2)]
    series += [(f"rootward_drafter_rows{{namespace='llm',pod='d{n}'}}", "16x480") for n in range(4)]
    series += [("rootward_drafter_rows{namespace='other'}", "16x480")]
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {"expr": f"round({query}, 0.01)", "eval_time": "90m", "exp_samples": [{"labels": "{}", "value": 63.33}]}
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [test]}), encoding="utf-8")
    done = run(promtool, "test", "rules", str(tmp_path / "test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_has_a_runbook():
    tested = (CASES / "alerts_test.yaml").read_text(encoding="utf-8")
    runbook = (ROOT / "docs" / "operations" / "runbook.md").read_text(encoding="utf-8")
    for alert in alerts():
        assert f'alertname="{alert["alert"]}"' in tested
        assert f"## {alert['alert']}\n" in runbook
        assert alert["annotations"]["runbook"] == f"docs/operations/runbook.md#{alert['alert'].lower()}"


def families() -> dict[str, list[tuple[str, str]]]:
    """(name, kind) of everything that a running service exports, by role."""
    gateway, verifier, drafter = GatewayMetrics(), VerifierMetrics(), CollectorRegistry()
    CallMetrics(gateway.registry)
    drafter.register(DemandCollector(lambda: {"p": DrafterDemand(4)}))
    Gauges(gateway.registry, OF_GATEWAY, lambda: dict.fromkeys(OF_GATEWAY, 0.0))
    verifier.watch(lambda: dict.fromkeys(OF_VERIFIER, 0.0), lambda: {"p": VerifierDemand()})
    Gauges(drafter, OF_DRAFTER, lambda: dict.fromkeys(OF_DRAFTER, 0.0))
    audit = DrafterAudit(verifier.registry, "v")
    none = np.empty((0, 1))
    audit.observe("d", Draws(none, none, none, np.empty(0, np.int64)))
    audit._alarms.labels("d")
    registries = {"gateway": gateway.registry, "verifier": verifier.registry, "drafter": drafter}
    text = {role: generate_latest(registry).decode() for role, registry in registries.items()}
    return {role: re.findall(r"^# TYPE (\S+) (\w+)", some, re.M) for role, some in text.items()}


def test_a_name_means_one_thing():
    """What two roles export under one name is the same thing seen from both, as in vLLM."""
    seen = Counter(name for role in families().values() for name, _ in role)
    assert {name.removesuffix("_created") for name, count in seen.items() if count > 1} == {
        "rootward_generation_tokens_total",
        "rootward_generation_tokens",
        "rootward_num_requests_running",
        "rootward_num_requests_waiting",
    }


def exported() -> set[str]:
    """Names of all samples that running services export."""
    every = [family for role in families().values() for family in role]
    histograms = {f"{name}_{end}" for name, kind in every if kind == "histogram" for end in ("bucket", "sum", "count")}
    summaries = {f"{name}_{end}" for name, kind in every if kind == "summary" for end in ("sum", "count")}
    return {name for name, _ in every} | histograms | summaries


def test_failures_of_ours_are_those_that_the_alert_counts():
    (refusing,) = [alert for alert in alerts() if alert["alert"] == "RootwardRefusing"]
    ours = re.compile(re.search(r'reason=~"([^"]*)"', refusing["expr"])[1])
    for error in (Overloaded, Unavailable, StreamInterrupted, ServiceError):
        assert ours.fullmatch(error.reason.lower()), error.reason
    for error in (RateLimited, InvalidRequest):  # of the client
        assert not ours.fullmatch(error.reason.lower()), error.reason


def test_every_metric_that_is_asked_for_is_exported(helm):
    names = exported()
    recorded = set(re.findall(r"record: rootward:(\w+)", (RULES / "drafter.yaml").read_text(encoding="utf-8")))
    pages = (ROOT / "docs" / "operations").glob("*.md")
    files = [*rule_files(), *(ROOT / "deploy" / "dashboards").glob("*.json"), *pages]
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert set(NAME.findall(text)) <= names, path.name
        assert set(re.findall(r"\brootward:(\w+)", text)) <= recorded, path.name
    asked = {
        m["external"]["metric"]["name"]
        for hpa in of_kind(helm.objects("hpa"), "HorizontalPodAutoscaler")
        for m in hpa["spec"]["metrics"]
        if m["type"] == "External"
    }
    (rule,) = yaml.safe_load((RULES / "adapter.yaml").read_text(encoding="utf-8"))["externalRules"]
    series = re.compile(re.search(r'=~"(.*)"', rule["seriesQuery"])[1])
    given = {
        re.sub(rule["name"]["matches"], rule["name"]["as"].replace("$", "\\"), f"rootward:{r}")
        for r in recorded
        if series.match(f"rootward:{r}")
    }
    assert asked == given
    assert rule["resources"] == {"namespaced": False}


def test_every_panel_can_be_of_one_release():
    for path in (ROOT / "deploy" / "dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        assert "release" in {variable["name"] for variable in dashboard["templating"]["list"]}
        for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
            selectors = re.findall(r"rootward[_:]\w+(\{[^}]*\})?", target["expr"])
            assert selectors
            assert all('release=~"$release"' in selector for selector in selectors), target["expr"]


def test_dashboards_are_what_their_script_writes():
    import importlib.util

    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "deploy" / "helm" / "dashboards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, content in module.outputs().items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python deploy/helm/dashboards.py"
