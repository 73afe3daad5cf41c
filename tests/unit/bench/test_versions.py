"""`python -m benchmarks.versions` compares pairs, and asks both checkouts for the same speculation."""

from __future__ import annotations

from rich.console import Console

from benchmarks.peers import prompts_of
from benchmarks.versions import parser, speculation, table_of
from rootward.demo import paths


def test_ratio_is_the_median_of_pairs_not_of_the_columns() -> None:
    # the machine became twice as slow between the pairs
    table = table_of([{"mode": "auto", "temperature": 0.0, "ms_per_token": [[9.0, 10.0], [18.0, 20.0], [21.0, 20.0]]}])
    console = Console(record=True, width=120)
    console.print(table)
    text = console.export_text()
    assert "0.900" in text
    assert "2 of 3" in text


def test_trees_are_required_and_plain_decoding_is_without_any() -> None:
    assert speculation("trees", 7) == {"mode": "required", "num_draft_tokens": 7}
    assert speculation("plain", 7) == "disabled"
    assert speculation("auto", 7) == "auto"


def test_its_options_are_enough_for_the_prompts_of_the_other_benchmarks() -> None:
    given = parser().parse_args(["--other", "folder", "--model", str(paths().target)])
    assert len(set(prompts_of(given, 3))) == 3
