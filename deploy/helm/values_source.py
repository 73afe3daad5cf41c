"""Writes values.yaml, values.schema.json and README.md of the chart from their one source.

    python deploy/helm/values_source.py

What there is to set is in values_chart.py, in the words of values_words.py. The `settings` maps are taken from the settings classes of the
services, so they cannot drift; a test runs this script and compares.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from values_chart import values
from values_words import Schema

CHART = Path(__file__).parent / "rootward"


def defaults(schema: Schema) -> Any:
    if "default" in schema or schema.get("type") != "object":
        return deepcopy(schema.get("default"))
    if "service's own default" in schema["description"]:
        return {}
    return {name: defaults(part) for name, part in schema["properties"].items()}


def written(schema: Schema, indent: str = "") -> list[str]:
    """values.yaml: every value with what it means above it."""
    lines = []
    for name, part in schema["properties"].items():
        meaning = part["description"] + (f" One of: {', '.join(part['enum'])}." if "enum" in part else "")
        lines += ["", f"{indent}# {meaning}"] if not indent else [f"{indent}# {meaning}"]
        value = defaults(part)
        if part.get("type") == "object" and "default" not in part and value:
            lines += [f"{indent}{name}:", *written(part, indent + "  ")]
        elif isinstance(value, dict | list) and value:
            block = yaml.safe_dump(value, sort_keys=False).rstrip().splitlines()
            lines += [f"{indent}{name}:", *(f"{indent}  {line}" for line in block)]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return lines


def rows_of(schema: Schema, path: str = "") -> list[str]:
    """README.md: one line per value."""
    found = []
    for name, part in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        leaf = part.get("type") != "object" or "properties" not in part
        if leaf:
            kind = part.get("type") or "/".join(str(o.get("type")) for o in part.get("anyOf", []))
            kind = " or ".join(kind) if isinstance(kind, list) else kind
            allowed = f" ({', '.join(part['enum'])})" if "enum" in part else ""
            default = json.dumps(part.get("default"), ensure_ascii=False)
            found.append(
                f"| `{here}` | {kind}{allowed} | `{default}` | {part.get('description', '')} |".replace("\n", " ")
            )
        else:
            found += rows_of(part, here)
    return found


README = """# rootward

Serves a large language model faster without changing its output law: a gateway, verifiers on large GPUs, pools of drafters on cheap
ones, Redis.

```sh
# the demo pair on CPUs; no CRD, operator or Prometheus is needed. The images are yours to build: docs/operations/images.md
helm install rootward deploy/helm/rootward --set global.imageRegistry=$REGISTRY
helm test rootward   # drafts are accepted, and the greedy text equals plain decoding
```

Values for other cases are in [`ci/`](ci): two drafter pools, external Redis with TLS, Sentinels and API keys, mutual TLS, HPA,
KEDA with and without Prometheus, no drafters, a small machine.
How to size, upgrade and watch it: [`docs/operations`](../../../docs/operations).
This page is written by `deploy/helm/values_source.py`, as are `values.yaml` and `values.schema.json`.

| value | type | default | meaning |
|---|---|---|---|
"""


def outputs() -> dict[Path, str]:
    schema = values()
    note = "# Written by deploy/helm/values_source.py; edit that file. Settings that a service knows: README.md."
    return {
        CHART / "values.yaml": "\n".join([note, *written(schema)]) + "\n",
        CHART / "values.schema.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n",
        CHART / "README.md": README + "\n".join(rows_of(schema)) + "\n",
    }


if __name__ == "__main__":
    for path, content in outputs().items():
        path.write_text(content, encoding="utf-8")
