"""The serving suite: its statistics, its prompts, and a smoke run on tiny random models. No times are asserted."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rootward.core.requests import Committed, Finish, FinishReason, SpeculationStats

ROOT = Path(__file__).resolve().parents[3]
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 96}
INFLATED = 300_000


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_can_be_imported():
    """They are no package: they are run from the root of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of two random models without a tokenizer; the draft shares nothing with the target but its vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    for name, layers, seed in (("target", 3, 0), ("draft", 1, 1)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            **SHAPE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            max_position_embeddings=128,
            initializer_range=0.2,
            tie_word_embeddings=True,
            eos_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def results(pair, tmp_path_factory):
    """A quick run with an inflated target: values, text, folder."""
    from benchmarks.suites import serving

    out, threads = tmp_path_factory.mktemp("out"), torch.get_num_threads()
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    shape = ["--inflate", str(INFLATED), "--layers", "4", "--threads", "1"]
    try:
        assert serving.main(["--quick", "--out", str(out), *models, *shape]) == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads((out / "serving.json").read_text()), (out / "serving.md").read_text(), out


def settings_of(results):
    return [(s["temperature"], s["context"], s["sessions"]) for s in results[0]["settings"]]


def test_every_setting_is_there(results):
    assert settings_of(results) == list(itertools.product((0.0, 1.0), (0,), (1, 2)))


def test_contexts_that_do_not_fit_are_cut_and_the_report_says_so():
    from benchmarks.suites.serving import fitting

    assert fitting([0, 100, 500, 116], longest_prompt=32, most=128, max_tokens=12) == (
        [0, 100, 116],
        "The models hold 128 tokens: contexts of 500 were cut to 116.",
    )
    assert fitting([0, 100], longest_prompt=32, most=128, max_tokens=12) == ([0, 100], "")


async def test_counts_of_our_runs_are_those_of_the_service():
    """Two sessions, each with three passes, two of them on trees of four nodes, three nodes accepted."""
    from benchmarks.suites.ours import Ours
    from benchmarks.suites.paired import Job

    class Verifier:
        async def generate(self, request):
            first = request.prompt[0]
            yield Committed(1, 0, (first, 2, 3), (True, True, False))
            stats = SpeculationStats(2, 1, 8, 3)
            yield Committed(1, 3, (4, 5, 6), (True, False, False), Finish(FinishReason.LENGTH, stats=stats))

    run = await Ours("ours", Verifier()).run(Job(((7,), (8,)), 1.0, 6, 3))
    assert run.tokens == [[7, 2, 3, 4, 5, 6], [8, 2, 3, 4, 5, 6]]
    assert (run.passes, run.speculated, run.drafted, run.accepted, run.first) == (6, 4, 16, 6, 6)


def test_every_system_made_every_token_in_every_repetition(results):
    for setting in results[0]["settings"]:
        names = set(setting["systems"])
        assert {"ours, plain", "ours, speculation", "transformers generate"} <= names
        assert ("transformers assisted" in names) is (setting["sessions"] == 1)
        assert ("transformers prompt lookup" in names) is (setting["sessions"] == 1)
        for system in setting["systems"].values():
            assert [run["num_tokens"] for run in system["runs"]] == [12 * setting["sessions"]] * 2


def test_ratios_are_those_of_the_raw_runs(results):
    to = {"plain": "ours, plain", "generate": "transformers generate", "assisted": "transformers assisted"}
    for setting in results[0]["settings"]:
        for system in setting["systems"].values():
            for key, ratio in system["ratio_to"].items():
                other = setting["systems"][to[key]]["runs"]
                ratios = [b["seconds"] / a["seconds"] for a, b in zip(system["runs"], other, strict=True)]
                assert ratio["median"] == pytest.approx(statistics.median(ratios))
                assert (ratio["low"], ratio["high"]) == pytest.approx((min(ratios), max(ratios)))


def test_what_comes_after_the_first_tokens_is_timed_apart(results):
    for setting in results[0]["settings"]:
        for system in setting["systems"].values():
            for run in system["runs"]:
                assert 0 < run["first_s"] < run["seconds"]
                assert setting["sessions"] <= run["first"] < run["num_tokens"]


def test_later_tokens_are_compared_without_what_the_prompt_took():
    from benchmarks.suites.paired import Paired, Run

    slow = Run([[0] * 11], 20.0, first_s=10.0, first=1)
    fast = Run([[0] * 11], 13.0, first_s=10.0, first=5)
    assert Paired({"a": [fast], "b": [slow]}).later_ratio("a", "b")[0] == 2.0
    assert Paired({"a": [fast], "b": [Run([[0] * 11], 20.0)]}).later_ratio("a", "b") is None


def test_models_are_extended_by_their_configuration_alone(pair, tmp_path):
    from benchmarks.suites.models import largest_difference, prepare

    longer = prepare(pair / "target", pair / "draft", None, 0, tmp_path, positions=500)
    assert json.loads((longer.target / "config.json").read_text())["max_position_embeddings"] == 500
    assert largest_difference(pair / "target", longer.target, [[1, 2, 3]]) == 0
    assert "**extended** to 500 positions" in longer.sentence()
    again = prepare(pair / "target", pair / "draft", None, 0, tmp_path, positions=500)
    assert again == longer


def test_greedy_texts_agree_across_systems(results):
    """All decode the same function: the inflated target's, from the same prompts."""
    for setting in results[0]["settings"]:
        if setting["temperature"] == 0:
            assert {s["same_text_as_plain"] for s in setting["systems"].values()} == {1.0}


def test_counts_of_passes_and_drafts_fit_together(results):
    for setting in results[0]["settings"]:
        for name, system in setting["systems"].items():
            for run in system["runs"]:
                assert 0 <= run["accepted"] <= run["drafted"]
                assert 0 < run["passes"] <= run["num_tokens"]
                assert run["speculated"] <= run["passes"]
                # Every pass adds one token of the target's own; what was cut at the end is at most the accepted ones.
                assert run["num_tokens"] <= run["passes"] + run["accepted"]
            if name in ("ours, plain", "transformers generate"):
                assert system["tokens_per_pass"] == 1.0
                assert system["acceptance"] is None


def test_every_table_says_that_the_target_is_inflated(results):
    values, text, out = results
    assert values["inflated"]
    assert values["pair"]["num_target"] >= INFLATED > values["pair"]["num_original"]
    assert text.count("Inflated target, ") == len(values["settings"]) == text.count("\n| system |")
    assert "acceptance is the small pair's" in text
    assert (out / "serving.png").stat().st_size <= 60_000
    assert str(out) not in json.dumps(values) + text


def test_a_different_function_is_refused(pair):
    from benchmarks.suites.models import largest_difference

    assert largest_difference(pair / "target", pair / "target", [[1, 2, 3]]) == 0
    with pytest.raises(ValueError, match="not the same function"):
        largest_difference(pair / "target", pair / "draft", [[1, 2, 3]])


@pytest.mark.parametrize("num_layers", [3, 24])
@pytest.mark.parametrize("wanted", [400_000, 3_000_000])
@pytest.mark.parametrize("tied", [True, False])
def test_the_width_gives_the_parameters_asked_for(num_layers, wanted, tied):
    from benchmarks.suites.models import width_for

    shape = {**SHAPE, "hidden_size": 32, "tie_word_embeddings": tied}
    width = width_for({**shape, "intermediate_size": 64}, num_layers, wanted)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=width, num_hidden_layers=num_layers))
    found = sum(p.numel() for p in model.parameters())
    assert wanted <= found <= wanted + 64 * 3 * 32 * num_layers


@pytest.mark.parametrize("n", [1, 2, 5, 8, 15])
def test_the_interval_covers_the_median_as_often_as_it_says(n):
    from benchmarks.intervals import interval

    rng, hits, trials = random.Random(n), 0, 4000
    for _ in range(trials):
        found = interval([rng.random() for _ in range(n)])
        assert found.low <= found.median <= found.high
        hits += found.low <= 0.5 <= found.high
    sigma = (found.coverage * (1 - found.coverage) / trials) ** 0.5
    assert abs(hits / trials - found.coverage) <= 4 * sigma
    assert found.coverage >= (0.9 if n >= 5 else 0)


def test_systems_take_every_place_equally_often():
    from benchmarks.suites.paired import orders

    names = ["a", "b", "c"]
    rows = list(orders(names, 6, seed=3))
    assert all(sorted(row) == names for row in rows)
    for place in range(3):
        assert sorted(row[place] for row in rows) == ["a", "a", "b", "b", "c", "c"]


def test_no_prompt_is_the_beginning_of_another():
    from benchmarks.suites.models import Prompts

    texts = [[100 * t + i for i in range(20)] for t in range(5)]
    prompts = Prompts(texts, seed=1)
    whole = [p for _ in range(6) for p in prompts.take(4, 0)]
    assert len({p[:4] for p in whole}) == len(whole)
    long = [p for _ in range(4) for p in prompts.take(2, 50)]
    assert {len(p) for p in long} == {50}
    assert len({p[:4] for p in whole + long}) == len(whole + long)


def test_wrong_flags_are_explained(pair, tmp_path, capsys):
    from benchmarks.suites import serving

    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--out", str(tmp_path)]
    for flags, words in (
        (["--draft", str(pair / "nothing")], "no folder"),
        (["--inflate", "much"], "300M"),
        (["--max-tokens", "127"], "--max-tokens"),
        (["--verifier", "num_draft_tokens"], "NAME=VALUE"),
    ):
        assert serving.main([*models, *flags]) == 2
        assert words in capsys.readouterr().err
