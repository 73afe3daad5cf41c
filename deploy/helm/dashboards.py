"""Writes deploy/dashboards/*.json: `python deploy/helm/dashboards.py`. A test runs it and compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

# title, unit, [(expression, legend)]
Panel = tuple[str, str, list[tuple[str, str]]]
OF_POOLS = (
    'namespace=~"$namespace", release=~"$release"'  # the pools of one of several models have its name before their own
)
N = f'{OF_POOLS}, model_name=~"$model_name"'  # ".*" matches series without the label, as where no models are listed

SPECULATION: list[Panel] = [
    ("Does speculation pay? (above 1: yes)", "none", [(f"rootward_spec_decode_speedup_estimate{{{N}}}", "{{pod}}")]),
    (
        "Tokens per pass of the target",
        "none",
        [
            (
                f"1 + sum(rate(rootward_spec_decode_num_accepted_tokens_total{{{N}}}[5m]))"
                f" / (sum(rate(rootward_spec_decode_num_drafts_total{{{N}}}[5m])) > 0)",
                "block efficiency",
            )
        ],
    ),
    (
        "Tokens per second",  # gateways count them as well: one of the target's a round, and the drafts that were accepted
        "none",
        [
            (
                f"sum(rate(rootward_spec_decode_rounds_total{{{N}}}[5m]))"
                f" + sum(rate(rootward_spec_decode_num_accepted_tokens_total{{{N}}}[5m]))",
                "committed",
            )
        ],
    ),
    (
        "Share of draft tokens accepted",
        "percentunit",
        [
            (
                f"sum(rate(rootward_spec_decode_num_accepted_tokens_total{{{N}}}[5m]))"
                f" / (sum(rate(rootward_spec_decode_num_draft_tokens_total{{{N}}}[5m])) > 0)",
                "accepted",
            )
        ],
    ),
    ("Rounds by kind", "none", [(f"sum by (kind) (rate(rootward_spec_decode_rounds_total{{{N}}}[5m]))", "{{kind}}")]),
    ("Drafters connected", "none", [(f"rootward_drafters_up{{{N}}}", "{{pod}}")]),
]
SCALING: list[Panel] = [
    (
        "Demand in rows, and rows there are",
        "none",
        [
            (f"rootward:drafter_demand{{{OF_POOLS}}}", "demand {{pool}}"),
            (f"sum by (pool) (rootward_drafter_rows{{{OF_POOLS}}})", "rows {{pool}}"),
        ],
    ),
    (
        "Rows busy with wanted growth (guard 0.85)",
        "percentunit",
        [(f"rootward:drafter_rows_busy{{{OF_POOLS}}}", "{{pool}}")],
    ),
    (
        "Time of rounds spent queueing at drafters (guard 0.10)",
        "percentunit",
        [(f"rootward:drafter_stall{{{OF_POOLS}}}", "{{pool}}")],
    ),
    ("Sessions that would take drafts", "none", [(f"rootward:speculating_sessions{{{OF_POOLS}}}", "{{pool}}")]),
    ("Round without queueing", "s", [(f"rootward:round_base_seconds{{{OF_POOLS}}}", "{{pool}}")]),
    ("Row-seconds a round wants", "s", [(f"rootward:drafter_row_seconds{{{OF_POOLS}}}", "{{pool}}")]),
]
SERVING: list[Panel] = [
    (
        "Time to first token, median and 95th percentile",
        "s",
        [
            (
                f"histogram_quantile({q}, sum by (le) (rate(rootward_time_to_first_token_seconds_bucket{{{N}}}[5m])))",
                f"{q}",
            )
            for q in (0.5, 0.95)
        ],
    ),
    (
        "Requests that ended and failed, per second",
        "none",
        [
            (f"sum by (finished_reason) (rate(rootward_request_success_total{{{N}}}[5m]))", "{{finished_reason}}"),
            (f"sum by (reason) (rate(rootward_requests_refused_total{{{N}}}[5m]))", "refused: {{reason}}"),
        ],
    ),
    (
        "Running and waiting",
        "none",
        [
            (f"rootward_num_requests_running{{{N}}}", "running {{pod}}"),
            (f"rootward_num_requests_waiting{{{N}}}", "waiting {{pod}}"),
        ],
    ),
    ("KV memory in use", "percentunit", [(f"rootward_kv_cache_usage_ratio{{{N}}}", "{{pod}}")]),
    (
        "Engine step, mean",
        "s",
        [
            (
                f"sum by (kind) (rate(rootward_step_duration_seconds_sum{{{N}}}[5m]))"
                f" / (sum by (kind) (rate(rootward_step_duration_seconds_count{{{N}}}[5m])) > 0)",
                "{{kind}}",
            )
        ],
    ),
    ("Verifiers that take requests, as gateways see it", "none", [(f"rootward_upstream_ready{{{N}}}", "{{pod}}")]),
]


def panel(number: int, about: Panel) -> dict[str, Any]:
    title, unit, targets = about
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
            for i, (expression, legend) in enumerate(targets)
        ],
    }


def dashboard(name: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        *(
            {
                "name": label,
                "type": "query",
                "datasource": SOURCE,
                "query": f"label_values(rootward_upstream_ready, {label})",
                "includeAll": True,
                **({} if label == "namespace" else {"allValue": ".*"}),  # those without the label, too
                "multi": True,
                "refresh": 2,
            }
            for label in ("namespace", "release", "model_name")
        ),
    ]
    return {
        "uid": f"rootward-{name}",
        "title": title,
        "tags": ["rootward"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": [panel(number, about) for number, about in enumerate(panels)],
    }


def outputs() -> dict[Path, str]:
    made = {
        "speculation": dashboard("speculation", "Rootward: does speculation pay?", SPECULATION),
        "scaling": dashboard("scaling", "Rootward: drafters and their demand", SCALING),
        "serving": dashboard("serving", "Rootward: requests", SERVING),
    }
    return {FOLDER / f"{name}.json": json.dumps(content, indent=1) + "\n" for name, content in made.items()}


if __name__ == "__main__":
    for path, content in outputs().items():
        path.write_text(content, encoding="utf-8")
