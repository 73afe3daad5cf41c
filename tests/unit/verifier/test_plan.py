"""`rootward plan`: its forecast is the controller's own decision, it names what would help, and it measures rounds as they are served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.plan_check import as_markdown, compared
from rootward.demo import paths, read_prompts, smollm2_head
from rootward.engine.loading import load_model
from rootward.engine.tabular import TabularModel
from rootward.errors import ConfigurationError
from verifier_service.plan.__main__ import is_head, main
from verifier_service.plan.forecast import Change, acceptance, acceptance_by_depth, forecast, forecasts
from verifier_service.plan.measurement import Bench, Cell, Measured, Verdict
from verifier_service.plan.report import answer, as_json
from verifier_service.settings import VerifierSettings
from verifier_service.speculation import ENTER, RoundResult, SpeculationController, StepTime

SIZES, LOADS = (0, 2, 4, 8, 16), (1, 8)
NUM_ROUNDS = 60


def measured(
    *,
    row_s: float = 0.0,
    step_s: float = 0.05,
    draft_s: float = 0.005,
    accepted: int = 3,
    remote: bool = True,
    hop_s: float = 0.0,
) -> Measured:
    """Rounds that accept the first `accepted` nodes, or as many as there are; trees are chains of at most 8 nodes."""
    cells = []
    for load in LOADS:
        for nodes in SIZES:
            path, longest = (tuple(range(1, min(most, nodes) + 1)) for most in (accepted, 8))
            step = step_s + row_s * load * (nodes + 1)
            drafting = [draft_s] * NUM_ROUNDS if nodes and draft_s else []
            cells.append(Cell(0.0, load, nodes, [step] * NUM_ROUNDS, drafting, [Verdict(path, longest)] * NUM_ROUNDS))
    return Measured(tuple(cells), dict.fromkeys(LOADS, 0.0), hop_s, SIZES[-1], remote)


def test_the_speed_up_is_that_of_the_controller_of_the_service() -> None:
    pair = measured(row_s=0.001)
    controller = SpeculationController(StepTime({n + 1: pair.step_s(0.0, 1, n) for n in SIZES}))
    statistics = controller.of("service")
    for cell in pair.cells:
        for one in cell.verdicts if cell.nodes else ():
            statistics.add(0, RoundResult(cell.nodes, cell.nodes, one.path, 0.005))
    controller.plan({statistics: 1}, most=16)
    found = forecast(pair, temperature=0.0, load=1)
    assert found.with_trees == pytest.approx(statistics.speedup, rel=1e-3)
    assert found.nodes == statistics.usual_nodes
    assert found.pays
    assert found.plain == pytest.approx(1 / pair.step_s(0.0, 1, 0))


def test_four_tokens_a_round_at_no_cost_are_four_times_the_speed() -> None:
    found = forecast(measured(draft_s=0.0), temperature=0.0, load=1)
    assert found.speedup == pytest.approx(4.0, rel=0.02)
    assert found.speed == pytest.approx(80.0, rel=0.02)


def test_what_the_controller_would_not_use_is_no_slower_than_plain_decoding() -> None:
    found = forecast(measured(accepted=0), temperature=0.0, load=1)
    assert found.speedup == 1.0
    assert found.with_trees < ENTER
    assert not found.pays


@pytest.mark.parametrize(
    ("pair", "rtt_ms", "change"),
    [
        (measured(draft_s=0.2), 0.0, Change.DRAFT),
        (measured(row_s=0.02, step_s=0.01), 0.0, Change.ROWS),
        (measured(accepted=1), 0.0, Change.ACCEPTANCE),
        (measured(), 300.0, Change.DISTANCE),
    ],
    ids=lambda value: value.name if isinstance(value, Change) else "",
)
def test_names_the_term_that_costs_most(pair: Measured, rtt_ms: float, change: Change) -> None:
    assert forecast(pair, temperature=0.0, load=1, rtt_ms=rtt_ms).helps_most is change


def test_names_nothing_where_no_change_would_gain_anything() -> None:
    assert forecast(measured(draft_s=0.0, accepted=8), temperature=0.0, load=1).helps_most is None


def test_distance_costs_a_drafter_and_nothing_that_is_in_the_verifier() -> None:
    near, far, beyond = (forecast(measured(), temperature=0.0, load=1, rtt_ms=ms).speedup for ms in (0, 20, 2000))
    assert near > far > 1.0
    assert beyond == 1.0
    local = [one.speedup for one in forecasts(measured(remote=False), loads=[1], rtts_ms=[0.0, 2000.0])]
    assert local == [pytest.approx(near, rel=1e-6)]


def test_load_between_two_measured_ones_lies_between_them() -> None:
    pair = measured(row_s=0.001)
    steps = [pair.step_s(0.0, load, 4) for load in (1, 4, 8)]
    assert steps == sorted(steps)
    assert steps[1] == pytest.approx(steps[0] + 3 / 7 * (steps[2] - steps[0]))
    speedups = [forecast(pair, temperature=0.0, load=load).speedup for load in (1, 4, 8)]
    assert speedups == sorted(speedups, reverse=True)


def test_acceptance_is_told_by_number_and_by_depth() -> None:
    pair = measured(accepted=3)
    by_number = acceptance(pair, 0.0)
    assert len(by_number) == 16
    assert min(by_number[:3]) > 0.95
    assert max(by_number[3:]) < 0.15
    assert acceptance_by_depth(pair, 0.0) == [1.0, 1.0, 1.0]


def test_answers_in_one_sentence() -> None:
    good, bad = measured(), measured(accepted=0)
    assert answer(forecasts(good, loads=[1, 8], rtts_ms=[0.0])).startswith("Yes: ")
    assert answer(forecasts(bad, loads=[1, 8], rtts_ms=[0.0])).startswith("No: decode plainly")
    mixed = [forecast(good, temperature=0.0, load=1), forecast(bad, temperature=0.0, load=8)]
    assert "but not at temperature 0 with 8 sessions" in answer(mixed)


def test_json_has_measurements_and_forecasts() -> None:
    pair = measured()
    report = json.loads(
        json.dumps(as_json(pair, forecasts(pair, loads=[1, 8], rtts_ms=[0.0, 5.0]), about={"target": "t"}))
    )
    assert (report["target"], len(report["rounds"]), len(report["forecasts"])) == ("t", 10, 4)
    assert report["forecasts"][0]["pays"]
    assert report["rounds"][1]["draft_ms"] == pytest.approx(5.0)


def test_error_of_the_forecast_is_relative_to_the_measurement() -> None:
    forecasts_made = [
        {"temperature": 0, "load": 1, "rtt_ms": 0, "plain_tokens_per_s": 10.0, "tokens_per_s": 30.0, "speedup": 3.0}
    ]
    rows = compared({"forecasts": forecasts_made}, [{"temperature": 0, "load": 1, "plain": 10.0, "auto": 20.0}])
    assert rows[0]["speedup_error"] == pytest.approx(0.5)
    table = as_markdown([{"name": "pair", "rows": rows}])
    assert "**+50%**" in table
    assert "0 of 1 forecasts" in table


# -- measuring ------------------------------------------------------------------------------------------------------------


def bench(draft: TabularModel | None, *, local: str = "none", **law: float) -> Bench:
    settings = VerifierSettings(
        model="t", num_draft_tokens=8, max_num_seqs=2, num_ahead_tokens=0, local_draft=local, num_threads=1
    )
    target = TabularModel(16, seed=1, max_slots=2, **law)
    return Bench(settings, target, prompts=[[1, 2, 3], [4, 5]], num_tokens=24, draft=draft, seed=3)


def test_a_draft_that_is_the_target_is_accepted_to_the_end_of_its_trees() -> None:
    made = bench(TabularModel(16, seed=1, max_slots=2))
    found = made.measure([0.0], [1, 2], 0.3, lambda _: None)
    made.thread.shutdown()
    assert (found.temperatures, found.loads, found.sizes) == ([0.0], [1, 2], [0, 1, 2, 3, 4, 6, 8])
    trees = [cell for cell in found.cells if cell.nodes]
    # at temperature 0 the likeliest child is the target's token, so every tree has its path
    assert all(len(one.path) >= 1 for cell in trees for one in cell.verdicts if one.longest)
    assert all(cell.step_s and cell.draft_s for cell in trees)
    assert found.hop_s > 0.0
    made.target.check_idle()  # every slot was given back


def test_rounds_without_trees_commit_one_token() -> None:
    made = bench(None, local="ngram", sharpness=8.0, order=1)
    found = made.measure([0.0], [1], 0.2, lambda _: None)
    made.thread.shutdown()
    plain = [cell for cell in found.cells if not cell.nodes]
    assert all(one.path == () for cell in plain for one in cell.verdicts)
    looked_up = [one for cell in found.cells if cell.nodes for one in cell.verdicts]
    assert any(one.path for one in looked_up)  # a greedy text of a table runs into a circle
    assert (found.hop_s, found.remote) == (0.0, False)


def test_plan_of_tables_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    target = "tabular:vocab=24,seed=1,sharpness=3,step_ms=3"
    given = [target, f"{target},noise=0.3,step_ms=0", "--load", "2", "--seconds", "2", "--tokens", "16", "--json"]
    assert main([*given, "--temperatures", "0"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {one["load"] for one in report["forecasts"]} == {1, 2}
    alone = next(one for one in report["forecasts"] if one["load"] == 1 and one["rtt_ms"] == 0)
    assert alone["tokens_per_round"] > 1.2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--load", "0"], "--load: 0"),
        (["--temperatures", "-1"], "--temperatures"),
        (["--prompts", "/nowhere"], "--prompts"),
        (["--nodes", "999"], "--nodes: 999"),
        (["--rtt", "5"], "--rtt: 5.0: ngram drafts in the verifier"),
        (["--out", "/nowhere/plan.png"], "--out: no folder '/nowhere'"),
        (["--out", "plan.txt"], "--out: 'plan.txt': name a .png, .svg or .pdf file"),
    ],
)
def test_wrong_options_are_refused_by_name(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(paths().target), "ngram", *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_distance_to_a_draft_head_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tabular:vocab=24,seed=1", str(smollm2_head()), "--rtt", "5"]) == 2
    assert "--rtt: 5.0: a draft head drafts in the verifier" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verifier_service.plan.report.find_spec", lambda name: None)
    assert main(["/no/model", "/no/draft", "--out", str(tmp_path / "plan.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_was_measured_is_printed_although_the_picture_fails(
    form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    pair = ["tabular:vocab=24,seed=1,sharpness=3,step_ms=3", "tabular:vocab=24,seed=1,sharpness=3"]
    small = ["--load", "1", "--seconds", "1", "--tokens", "16", "--nodes", "2", "--temperatures", "0"]
    assert main([*pair, *small, "--out", str(tmp_path / "plan.png"), *form]) == 2
    printed = capsys.readouterr()
    assert "speedup" in printed.out if form else "speed-up" in printed.out
    assert "no space left" in printed.err


def test_a_draft_with_another_tokenizer_drafts_the_tokens_that_both_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "draft"
    shutil.copytree(paths().draft, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    rarest, second = sorted(vocab, key=vocab.__getitem__)[-2:]
    vocab[rarest], vocab[second] = vocab[second], vocab[rarest]
    file.write_text(json.dumps(content), encoding="utf-8")
    small = ["--load", "1", "--seconds", "2", "--tokens", "24", "--nodes", "2", "--temperatures", "0"]
    assert main([str(paths().target), str(other), *small, "--json"]) == 0
    rounds = json.loads(capsys.readouterr().out)["rounds"]
    assert max(one["tokens_per_round"] for one in rounds if one["nodes"] == 2) > 1.2


def test_a_draft_of_another_vocabulary_without_a_tokenizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tabular:vocab=24,seed=1", "tabular:vocab=25,seed=1"]) == 3
    assert "check-pair" in capsys.readouterr().err


def test_tells_heads_from_models() -> None:
    assert is_head(str(smollm2_head()))
    assert not is_head(str(paths().draft))
    assert not is_head("ngram")


def test_prompts_are_lines_or_json_lines(tmp_path) -> None:
    plain, lines, wrong = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_text("one\n\ntwo\n")
    lines.write_text('{"text": "one"}\n')
    wrong.write_text("{}\n")
    assert read_prompts(plain) == ["one", "two"]
    assert read_prompts(lines) == ["one"]
    with pytest.raises(ConfigurationError, match="no object with `text`"):
        read_prompts(wrong)


def test_the_demo_pair_loads_for_a_plan() -> None:
    """What `plan` asks of a model beyond the port: its tokenizer."""
    assert getattr(load_model(str(paths().draft), max_slots=1, max_len=64), "tokenizer", None) is not None
