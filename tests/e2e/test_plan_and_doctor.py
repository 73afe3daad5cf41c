"""`rootward plan` on the shipped pair and `rootward doctor` on a running deployment, as commands."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.heads import eagle3
from transformers import AutoModelForCausalLM

from gateway.local import serve_all
from gateway.settings import LocalSettings
from rootward import demo

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]


def command(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "rootward.cli", *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_plan_of_the_shipped_pair(tmp_path: Path) -> None:
    pair, picture, prompts = demo.paths(), tmp_path / "plan.png", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in demo.prompts()[:8]))
    small = ["--load", "2", "--nodes", "4", "--tokens", "48", "--seconds", "3"]
    flags = ["--prompts", str(prompts), "--raw", *small, "--out", str(picture), "--json"]
    code, out, err = command("plan", str(pair.target), str(pair.draft), *flags)
    assert code == 0, err
    report = json.loads(out)
    assert {one["load"] for one in report["forecasts"]} == {1, 2}
    assert {one["temperature"] for one in report["forecasts"]} == {0.0, 1.0}
    assert min(acceptance(report, temperature) for temperature in (0.0, 1.0)) > 0.3
    for one in report["measured"]:
        assert min(one["plain_tokens_per_s"], one["auto_tokens_per_s"], one["lookup_tokens_per_s"]) > 0
        assert [trees["nodes"] for trees in one["trees"]] == [2, 4]
        assert all(1.3 < trees["tokens_per_round"] <= 1 + trees["nodes"] for trees in one["trees"])
        assert all(trees["draft_ms"] >= 0 for trees in one["trees"])  # a difference of timings
    assert picture.read_bytes().startswith(b"\x89PNG")


def acceptance(report: dict[str, Any], temperature: float) -> float:
    """Of the first token of trees of 4 nodes, mean over the loads."""
    found = [
        trees["acceptance_by_depth"][0]
        for one in report["measured"]
        for trees in one["trees"]
        if (one["temperature"], trees["nodes"]) == (temperature, 4)
    ]
    return sum(found) / len(found)


def test_plan_of_look_up() -> None:
    pair, small = (
        demo.paths(),
        ["--load", "1", "--nodes", "4", "--tokens", "48", "--seconds", "2", "--temperatures", "0"],
    )
    code, out, err = command("plan", str(pair.target), "ngram", *small, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert {one["rtt_ms"] for one in report["forecasts"]} == {0.0}
    (one,) = report["measured"]
    assert one["lookup_tokens_per_s"] is None
    assert all(1.0 < trees["tokens_per_round"] <= 1 + trees["nodes"] for trees in one["trees"])


def test_plan_of_a_draft_head(tmp_path: Path) -> None:
    """Its forward counts as drafting, and it is at no distance."""
    target = demo.paths().target
    network = AutoModelForCausalLM.from_pretrained(target)
    head = eagle3(tmp_path / "head", network, draft_ids=None)
    small = ["--load", "1", "--nodes", "4", "--tokens", "16", "--seconds", "2", "--temperatures", "0", "--json"]
    code, out, err = command("plan", str(target), str(head), *small)
    assert code == 0, err
    report = json.loads(out)
    assert {one["rtt_ms"] for one in report["forecasts"]} == {0.0}
    assert all(trees["draft_ms"] > 0 for trees in report["measured"][0]["trees"])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_was_measured_is_printed_although_the_picture_fails(form: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    picture.mkdir()  # cannot be written as a file
    target = "tabular:vocab=24,seed=1,sharpness=3,step_ms=3"
    small = ["--load", "1", "--seconds", "1", "--tokens", "16", "--nodes", "2", "--temperatures", "0"]
    code, out, err = command("plan", target, f"{target},noise=0.3", *small, "--out", str(picture), *form)
    assert code == 2
    assert "speedup" in out if form else "speed-up" in out
    assert "cannot be written" in err


def test_plan_of_a_draft_with_another_tokenizer_drafts_the_tokens_that_both_have(tmp_path: Path) -> None:
    other = tmp_path / "draft"
    shutil.copytree(demo.paths().draft, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    rarest, second = sorted(vocab, key=vocab.__getitem__)[-2:]
    vocab[rarest], vocab[second] = vocab[second], vocab[rarest]
    file.write_text(json.dumps(content), encoding="utf-8")
    small = ["--load", "1", "--seconds", "4", "--tokens", "24", "--nodes", "2", "--temperatures", "0", "--json"]
    code, out, err = command("plan", str(demo.paths().target), str(other), *small)
    assert code == 0, err
    assert json.loads(out)["measured"][0]["trees"][0]["tokens_per_round"] > 1.2


def test_plan_of_models_that_cannot_be_served_ends_with_the_reason() -> None:
    code, out, err = command("plan", "/no/model", "ngram", "--seconds", "1")
    assert (code, out) == (2, "")
    assert "/no/model" in err
    assert "Traceback" not in err


async def test_doctor_of_a_running_deployment() -> None:
    table = "tabular:vocab=40,seed=1,sharpness=2"
    settings = LocalSettings(
        model=table,
        draft_model=f"{table},noise=0.7",
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        shutdown_timeout_s=2.0,
    )
    async with serve_all(settings) as running:
        assert running.redis is not None
        flags = ["--gateway", running.address, "--redis-url", f"redis://{running.redis.address}/0", "--output", "json"]
        code, out, err = await asyncio.to_thread(command, "doctor", *flags)
    report = json.loads(out)
    levels = {one["name"]: one["level"] for one in report["findings"]}
    for name in ("gateway", "verifiers", "drafters", "versions"):
        assert levels[name] == "ok", (name, report)
    for name in ("clocks", "distance", "redis"):  # on a busy machine answers are late, which is a warning
        assert levels[name] in ("ok", "warning"), (name, report)
    assert code == (0 if report["healthy"] else 3), err
