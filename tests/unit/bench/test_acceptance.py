"""`rootward bench acceptance`: expected tokens per round from the K declared tokens, measured strategy-rule pairs, report, errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import acceptance
from rootward.core import verification
from rootward.core.growth import BestFirst, strategy_of
from rootward.core.living_tree import ROOT
from rootward.core.requests import DraftMode, DraftStrategy, Rule, Sampling
from rootward.core.tree import TokenTree
from rootward.engine.loading import load_model
from rootward.engine.sampling import distributions

TARGET = "tabular:vocab=12,seed=1,sharpness=2"
PAIR = ["--target", TARGET, "--draft", f"{TARGET},noise=1"]
SMALL = [*PAIR, "--num-contexts", "12", "--nodes", "4", "8"]


def options(*flags: str):
    return acceptance.checked(acceptance.parser().parse_args([*SMALL, *flags]))


@pytest.fixture(scope="module")
def report():
    return acceptance.measure(options())


def cells(report, **wanted):
    found = [acceptance.Cell(**cell) for cell in report["cells"]]
    return [cell for cell in found if all(getattr(cell, name) == value for name, value in wanted.items())]


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("rsd_c:2,2", "traversal"),
        ("rsd_s:3,3", "token"),
        ("iid:3,2", "multi_step"),
        ("chain:3", "block"),
        ("greedy", "traversal"),
    ],
)
def test_expected_tokens_agree_with_the_law_over_the_whole_vocabulary(strategy, rule):
    settings = options("--num-atoms", "12")
    models = [load_model(spec, max_slots=3, max_len=64) for spec in (settings.target, settings.draft)]
    contexts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    target, draft = (acceptance.Slots(model, contexts) for model in models)
    parsed = DraftStrategy.parse(strategy)
    mode = parsed.mode or DraftMode.SAMPLED
    trees = acceptance.grown(draft, strategy_of(parsed, mode, BestFirst()), Sampling(1.0), 12, settings, 12)
    rounds = acceptance.rounds_of(target, trees, Sampling(1.0), 12)
    for grown, found in zip(trees, rounds, strict=True):
        ids = [ROOT, *grown.tree.nodes]
        logits = target.forward([(grown.context, grown.tree, ids)])
        target.release()
        rows = distributions(logits, [Sampling(1.0)] * len(ids)).double().numpy()
        q = np.zeros((len(ids), 12))
        for i, node in enumerate(ids):
            if grown.tree.at(node).children and (declared := grown.tree.at(node).row) is not None:
                q[i, declared[0]] = declared[1] / declared[1].sum()
        records = list(grown.tree.nodes.values())
        tree = TokenTree(
            [0, *(r.token for r in records)],
            [-1, *(ids.index(r.parent) for r in records)],
            [False, *(r.sampled for r in records)],
        )
        law = verification.law(rule, tree, rows, q, replacement=mode is DraftMode.IID)
        assert acceptance.tokens_per_round(found, Rule(rule), mode) == pytest.approx(law.block_efficiency, abs=1e-6)


def test_every_strategy_is_measured_under_the_rules_that_are_lossless_for_it(report):
    found = {(cell.strategy, cell.rule) for cell in cells(report, temperature=1.0)}
    for rule in ("traversal", "token", "block", "match"):
        assert ("chain:4", rule) in found
    assert ("iid:2,2,2", "multi_step") in found
    assert ("coupled", "match") in found
    for wrong in (
        ("rsd_s:4,4", "block"),
        ("rsd_c:2,2,2", "multi_step"),
        ("coupled", "token"),
        ("iid:2,2,2", "block"),
    ):
        assert wrong not in found


def test_temperature_0_uses_the_match_rule_only(report):
    assert {cell.rule for cell in cells(report, temperature=0.0)} == {"match"}


@pytest.mark.parametrize("strategy", ["top_k", "marginals"])
def test_all_rules_accept_the_longest_match_of_a_deterministic_tree(report, strategy):
    for nodes in (4, 8):
        found = {round(cell.tokens, 6) for cell in cells(report, temperature=1.0, strategy=strategy, max_nodes=nodes)}
        assert len(found) == 1


def test_traversal_of_a_chain_is_block_verification_and_above_token_level(report):
    tokens = {cell.rule: cell.tokens for cell in cells(report, temperature=1.0, strategy="chain:4")}
    assert tokens["traversal"] == pytest.approx(tokens["block"])
    assert tokens["traversal"] >= tokens["token"] >= tokens["match"] >= 1.0


def test_node_budget_limits_strategies_without_a_fixed_shape(report):
    assert all(cell.nodes <= cell.max_nodes for cell in cells(report))
    assert {cell.nodes for cell in cells(report, strategy="chain:4")} == {4.0}


def test_results_are_reproducible():
    few = ("--strategies", "rsd_s:2,2", "coupled", "--temperatures", "1")
    assert acceptance.measure(options(*few))["cells"] == acceptance.measure(options(*few))["cells"]


def test_the_report_is_written_as_json_and_markdown(tmp_path, capsys):
    flags = [*SMALL, "--strategies", "chain:2", "--out", str(tmp_path)]
    assert acceptance.main(flags) == 0
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert {"date", "commit", "hardware", "versions", "target", "draft", "cells"} <= set(found)
    text = (tmp_path / "acceptance.md").read_text()
    assert "| chain:2 | traversal | 2.0 | 2.0 |" in text
    assert "chain:2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--temperatures", "-1"], "--temperatures"),
        (["--strategies", "magic"], "'magic' is unknown"),
        (["--num-contexts", "1"], "--num-contexts"),
        (["--target", "./nowhere"], "no folder"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(flags, message, capsys):
    assert acceptance.main([*SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_models_of_different_vocabularies_are_refused(capsys):
    assert acceptance.main(["--target", "tabular:vocab=5", "--draft", "tabular:vocab=6"]) == 3
    assert "tokenizer" in capsys.readouterr().err
