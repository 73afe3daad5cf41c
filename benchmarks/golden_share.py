"""How much of the optimum the rules reach on the golden models, where the linear programme was solved exactly.

Needs the checkout: `tests/golden` is no part of the installed library. The values there are exact and the tests hold
the library to them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
FILES = ("tiny.json", "random.json")


def shares() -> dict[tuple[str, str], list[float]]:
    """accepted / optimum by (construction with its shape, rule), one number a model."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for file in FILES:
        for model in json.loads((GOLDEN / file).read_text(encoding="utf-8"))["models"]:
            best = {_shape(e): e["accepted_float"] for e in model["expected"] if e["algorithm"] == "optimum"}
            for entry in model["expected"]:
                if entry["algorithm"] != "optimum" and best.get(_shape(entry)):
                    found[_shape(entry), entry["algorithm"]].append(entry["accepted_float"] / best[_shape(entry)])
    return dict(found)


def golden_share() -> str:
    """A small Markdown table, or "" without the golden files."""
    if not all((GOLDEN / file).is_file() for file in FILES):
        return ""
    lines = [
        "## Share of the optimum on the golden models",
        "",
        "Accepted draft tokens over the linear-programme optimum of the same tree law (exact, tiny models).",
        "",
        "| construction | rule | models | mean | worst |",
        "|---|---|---:|---:|---:|",
    ]
    for (shape, rule), values in sorted(shares().items()):
        lines.append(f"| {shape} | {rule} | {len(values)} | {np.mean(values):.1%} | {min(values):.1%} |")
    return "\n".join(lines)


def _shape(entry: dict[str, Any]) -> str:
    if "branching" in entry:
        return f"{entry['draft']} {entry['branching']}"
    size = [f"{name} {entry[name]}" for name in ("width", "paths", "depth") if name in entry]
    return f"{entry['draft']} {', '.join(size)}"
