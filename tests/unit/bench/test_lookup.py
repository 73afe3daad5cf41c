"""Replaying drafters that look things up on a text."""

from __future__ import annotations

import json

import pytest
from support.random_tokens import RandomTokens

from benchmarks.lookup import main, measure, replayed
from rootward.core.lookup import Ngram, Prediction, parse_recipe
from rootward.core.requests import DraftMode

BUDGET = 8


def test_a_right_prediction_comes_in_full_rounds() -> None:
    text = list(range(30))
    counts = replayed(Prediction(text, prefix=1), [99], text, BUDGET)
    assert (counts.rounds, counts.tokens) == (4, 30)  # 9 + 9 + 9 + 3
    assert counts.block_efficiency == 7.5


def test_new_text_comes_token_by_token() -> None:
    counts = replayed(Ngram(), [99], list(range(30)), BUDGET)
    assert (counts.rounds, counts.nodes) == (30, 0)
    assert replayed(RandomTokens(10**6), [99], list(range(30)), BUDGET).rounds == 30


def test_a_recipe_shares_its_memory_over_the_texts() -> None:
    texts = [([1], [2, 3, 4, 5]), ([1], [2, 3, 4, 5])]
    recipe = parse_recipe("recycling:")
    [matched] = measure([recipe], texts, [8], DraftMode.COUPLED)
    [ratio] = measure([recipe], texts, [8], DraftMode.SAMPLED)
    assert (matched["rounds"], ratio["rounds"]) == (5, 8)


def test_the_command_writes_a_table_and_a_report(tmp_path, capsys) -> None:
    flags = ["--model", "tabular:vocab=6,seed=1,sharpness=6", "--num-texts", "6", "--length", "80"]
    more = ["--sources", "ngram:", "recycling:", "--budgets", "4", "--temperatures", "0"]
    assert main([*flags, *more, "--out", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out.count("\n| 0 |") == 2
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert all(result["block_efficiency"] > 1.0 for result in results)


@pytest.mark.parametrize(("spec", "word"), [("foo:", "use ngram:"), ("ngram:depth=1", "write ngram:")])
def test_an_unknown_source_is_refused_with_the_fix(spec: str, word: str, capsys) -> None:
    assert main(["--sources", spec]) == 2
    assert word in capsys.readouterr().err
