"""Recording, alert and adapter rules: valid, right on the golden cases, and about metrics that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from support.helm import CHART, ROOT, of_kind

from drafter_service.metrics import READINGS as OF_DRAFTER
from drafter_service.metrics import Metrics as DrafterMetrics
from gateway.metrics import Metrics as GatewayMetrics
from rootward.demand import DemandCollector, DrafterDemand, VerifierDemand
from verifier_service.metrics import READINGS as OF_VERIFIER
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
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_rules_are_valid(promtool):
    done = run(promtool, "check", "rules", "--lint=all", *map(str, rule_files()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cases", ["drafter_test.yaml", "alerts_test.yaml"])
def test_rules_compute_what_they_must(promtool, cases):
    done = run(promtool, "test", "rules", str(CASES / cases))
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_every_alert_is_tested_and_has_a_runbook():
    tested = (CASES / "alerts_test.yaml").read_text(encoding="utf-8")
    runbook = (ROOT / "docs" / "operations" / "runbook.md").read_text(encoding="utf-8")
    for alert in alerts():
        assert f'alertname="{alert["alert"]}"' in tested
        assert f"## {alert['alert']}\n" in runbook
        assert alert["annotations"]["runbook"] == f"docs/operations/runbook.md#{alert['alert'].lower()}"


def exported() -> set[str]:
    """Names of all samples that running services export."""
    demand = CollectorRegistry()
    demand.register(DemandCollector(lambda: {"p": DrafterDemand(4)}))
    gateway, verifier, drafter = GatewayMetrics(), VerifierMetrics(), DrafterMetrics()
    verifier.watch(lambda: dict.fromkeys(OF_VERIFIER, 0.0), lambda: {"p": VerifierDemand()})
    drafter.watch(lambda: dict.fromkeys(OF_DRAFTER, 0.0))
    text = b"".join(
        generate_latest(r) for r in (demand, gateway.registry, verifier.registry, drafter.registry)
    ).decode()
    families = re.findall(r"^# TYPE (\S+) (\w+)", text, re.M)
    histograms = {
        f"{name}_{end}" for name, kind in families if kind == "histogram" for end in ("bucket", "sum", "count")
    }
    summaries = {f"{name}_{end}" for name, kind in families if kind == "summary" for end in ("sum", "count")}
    return {name for name, _ in families} | histograms | summaries


def test_every_metric_that_is_asked_for_is_exported(helm):
    names = exported()
    recorded = set(re.findall(r"record: rootward:(\w+)", (RULES / "drafter.yaml").read_text(encoding="utf-8")))
    files = [*rule_files(), *(ROOT / "deploy" / "dashboards").glob("*.json")]
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


def test_dashboards_are_what_their_script_writes():
    import importlib.util

    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "deploy" / "helm" / "dashboards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, content in module.outputs().items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python deploy/helm/dashboards.py"
