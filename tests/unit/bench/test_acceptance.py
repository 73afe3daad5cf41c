"""The command: its report, its checks, its errors."""

from __future__ import annotations

import json

import pytest

from benchmarks import acceptance, options, plots
from benchmarks.golden_share import golden_share
from benchmarks.winners import comparisons, disagreeing, traversal_below_token

PAIR = ["--target", "tabular:vocab=12,seed=1,sharpness=2", "--draft", "tabular:vocab=12,seed=1,sharpness=2,noise=1"]
KINDS = (
    "chain,rsd_c_narrow,rsd_s_w2,iid_paths,iid_copies,greedy_bushy,best_first_0.7,greedy_root3_0.7,"
    "top_k_best_first,eagle2,coupled_0.7"
)
SMALL = [*PAIR, "--num-contexts", "24", "--budgets", "4,8", "--temperatures", "0,1", "--processes", "1", "--no-levels"]
SMALL += ["--drafting", KINDS]
CELL = {
    "temperature": float,
    "budget": int,
    "construction": str,
    "rule": str,
    "baseline": bool,
    "block_efficiency": float,
    "ci_low": float,
    "ci_high": float,
    "given_trees": float,
    "measured": float,
    "measured_error": float,
    "num_measured": int,
    "z": float,
    "agrees": bool,
    "nodes": float,
    "levels": float,
    "survival": list,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return acceptance.run(options.parsed([*SMALL, "--out", str(tmp_path_factory.mktemp("run"))]))


def test_drawn_verdicts_agree_with_the_closed_form_in_every_cell(results):
    assert disagreeing(results) == []


def test_traversal_is_at_least_token_level_in_every_cell(results):
    assert traversal_below_token(results) == []


def test_temperature_0_shows_the_longest_match_only(results):
    assert {cell.rule for cell in results.select(temperature=0.0)} == {"match"}
    assert all(cell.measured_error == 0.0 for cell in results.select(temperature=0.0))


def test_survival_adds_up_to_the_efficiency(results):
    for cell in results.cells:
        assert cell.survival.sum() == pytest.approx(cell.efficiency, abs=1e-9)
        assert cell.survival[0] == pytest.approx(1.0)


def test_every_budget_and_temperature_has_its_winners(results):
    found = comparisons(results)
    assert [(c.best.temperature, c.best.budget) for c in found] == [(t, b) for t in (0.0, 1.0) for b in (4, 8)]
    for comparison in found:
        middle, low, high = comparison.over_token
        assert low <= middle <= high


def test_the_report(results, tmp_path):
    acceptance.write(results, tmp_path)
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert found["format"] == "rootward-acceptance/1"
    assert {"date", "commit", "hardware", "versions", "target", "draft", "seed", "seconds"} <= set(found["metadata"])
    for cell in found["cells"]:
        assert {name: type(value) for name, value in cell.items()} == CELL
    text = (tmp_path / "acceptance.md").read_text()
    assert "## Winners at equal node budget" in text
    assert text.count("**") > 8
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".md", ".png"}


def test_without_matplotlib_there_is_a_message_and_no_plot(results, tmp_path, monkeypatch, capsys):
    def missing(*_):
        raise ImportError("matplotlib")

    monkeypatch.setattr(plots, "draw", missing)
    acceptance.write(results, tmp_path)
    assert "matplotlib is missing" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_groups_of_contexts_do_not_depend_on_the_processes(tmp_path):
    few = [*PAIR, "--num-contexts", "6", "--budgets", "4", "--temperatures", "1", "--no-levels"]
    few += ["--drafting", "chain,coupled_0.7", "--out", str(tmp_path)]
    one, two = (acceptance.run(options.parsed([*few, "--processes", n])) for n in ("1", "2"))
    assert acceptance.as_json(one)["cells"] == acceptance.as_json(two)["cells"]


def test_growth_by_levels(tmp_path, monkeypatch):
    from benchmarks import levels
    from rootward.core.requests import DraftMode

    laws = [*DraftMode, *levels.SHAPES]
    settings = [levels.Setting(law, 0.7, 2, 3) for law in laws]
    monkeypatch.setattr(levels, "settings", lambda temperature: settings if temperature else [])
    argv = [*PAIR, "--num-contexts", "4", "--budgets", "4", "--temperatures", "1", "--processes", "1"]
    argv += ["--drafting", "chain", "--out", str(tmp_path)]
    found = acceptance.run(options.parsed(argv))
    acceptance.write(found, tmp_path)
    for law in laws:
        cells = [cell for cell in found.level_cells if cell.law == str(getattr(law, "value", law))]
        assert [cell.levels for cell in cells] == [1, 2, 3, 4, 6, 8]
        assert cells[-1].efficiency > cells[0].efficiency > 1.0
    assert "## Growth under a limit of draft forwards" in (tmp_path / "acceptance.md").read_text()


def test_the_share_of_the_optimum_is_read_from_the_golden_models():
    assert "| greedy [2, 2] | traversal |" in golden_share()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--budgets", "0"], "--budgets"),
        (["--budgets", "x"], "--budgets"),
        (["--temperatures", "-1"], "--temperatures"),
        (["--rules", "magic"], "'magic' is unknown"),
        (["--drafting", "magic"], "'magic' is unknown"),
        (["--noise", "-1"], "--noise"),
        (["--noise", "1", "--draft", "tabular:vocab=5"], "--noise"),
        (["--what"], "--what"),
        (["--greedy-draft-temperature", "0"], "--greedy-draft-temperature"),
        (["--target", "./nowhere", "--processes", "1"], "no folder"),
        ([*PAIR, "--prompts", "nowhere.txt", "--target", "tabular:vocab=x", "--processes", "1"], "is not a number"),
        (["--out", "/dev/null/x"], "--out"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(argv, said, tmp_path, capsys):
    if "--out" not in argv:
        argv = [*argv, "--out", str(tmp_path)]
    assert acceptance.main(argv) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert len([line for line in err.splitlines() if line.strip() and "━" not in line]) == 1


def test_models_of_different_vocabularies_are_refused(tmp_path, capsys):
    argv = ["--target", "tabular:vocab=5", "--draft", "tabular:vocab=6", "--processes", "1", "--out", str(tmp_path)]
    assert acceptance.main(argv) == 3
    assert "tokenizer" in capsys.readouterr().err


def test_prompts_are_read_as_json_lines_or_plain_lines(tmp_path):
    from benchmarks.contexts import read_prompts
    from rootward.errors import ConfigurationError

    lines = tmp_path / "p.jsonl"
    lines.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert read_prompts(lines) == ["a", "b"]
    plain = tmp_path / "p.txt"
    plain.write_text("one\ntwo\n")
    assert read_prompts(plain) == ["one", "two"]
    lines.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigurationError, match="text"):
        read_prompts(lines)
