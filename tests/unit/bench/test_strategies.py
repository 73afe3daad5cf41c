"""`benchmarks.strategies`: what counts as a fault, and a short run through the services."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.strategies import Cell, faults, main, per_pass
from rootward.core.requests import Rule, SpeculationStats

GROWTH = Path(__file__).parents[3] / "docs" / "algorithms" / "growth.md"
SERVED = [Cell("chain:8", "block", p_value=0.5), Cell("top_k", "match", p_value=0.2), Cell("top_k", "token", "no")]
CONTROL = [Cell("chain:8", "block", p_value=1e-20), Cell("chain:8", "match", p_value=0.3)]


def documented() -> dict[str, set[str]]:
    """Rules by the name of a strategy, in the table of docs/algorithms/growth.md."""
    rows = [line.split("|") for line in GROWTH.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {re.split("[:`]", row[1].strip(" `"))[0]: set(row[3].strip().split(", ")) for row in rows}


def test_results_as_they_must_be_are_no_faults() -> None:
    assert faults(SERVED, CONTROL) == []


@pytest.mark.parametrize(
    ("served", "control", "named"),
    [
        ([Cell("greedy", "traversal", p_value=1e-6)], [], "greedy, traversal"),
        ([Cell("greedy", "token", p_value=0.5, with_tree=0.6)], [], "greedy, token: 60% of the rounds"),
        ([], [Cell("chain:8", "block", p_value=0.01)], "control, chain:8, block"),
        ([], [Cell("chain:8", "match", p_value=1e-20)], "control, chain:8, match"),
        ([], [Cell("chain:8", "block", refused="no drafter", p_value=math.nan)], "control, chain:8, block"),
    ],
)
def test_a_fault_is_named(served: list[Cell], control: list[Cell], named: str) -> None:
    assert faults([*SERVED, *served], [*CONTROL, *control])[0].startswith(named)


def test_many_small_faults_are_one() -> None:
    assert faults([Cell("greedy", "traversal", p_value=0.01)] * 5, [])[-1].startswith("all pairs together")


def test_tokens_per_pass_are_those_of_all_texts() -> None:
    found = [([0] * 6, SpeculationStats(num_spec_steps=2)), ([0] * 4, SpeculationStats(1, 2))]
    ratio, error = per_pass(found)
    assert ratio == 2.0
    assert error == pytest.approx(math.sqrt(2 * (2**2 + 2**2)) / 5)


def test_a_short_run_serves_the_documented_pairs_and_refuses_all_others(tmp_path: Path) -> None:
    drafts = ["best_first", "chain:8", "rsd_s:4,4", "iid:2,2,2", "top_k", "coupled", "ngram", "ngram:"]
    size = [
        "--prompts",
        "2",
        "--tokens",
        "12",
    ]  # of texts to test: those of the whole run, or the statistic is too coarse
    assert main(["--drafts", *drafts, *size, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "strategies.json").read_text())
    served: dict[str, set[str]] = {name: set() for name in drafts}
    for cell in report["cells"]:
        if not cell["refused"]:
            served[cell["drafts"]].add(cell["rule"])
            assert (
                cell["tokens_per_pass"] > 1 or cell["drafts"] != "best_first"
            )  # others have none in so few tokens, by chance
    assert {name: served[name] for name in drafts[:-2]} == {
        name: documented()[name.partition(":")[0]] for name in drafts[:-2]
    }
    assert served["ngram"] == {"traversal", "token", "match"}
    assert served["ngram:"] == {"traversal", "token", "match", "block"}
    assert len(report["cells"]) == len(drafts) * len(Rule)
    assert "| `iid:2,2,2` |" in (tmp_path / "README.md").read_text()
