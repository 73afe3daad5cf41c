"""`rootward plan` on the shipped pair and `rootward doctor` on a running deployment, as commands."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    small = ["--load", "2", "--nodes", "4", "--tokens", "48", "--seconds", "8"]
    flags = ["--prompts", str(prompts), "--raw", *small, "--out", str(picture), "--json"]
    code, out, err = command("plan", str(pair.target), str(pair.draft), *flags)
    assert code == 0, err
    report = json.loads(out)
    assert {one["load"] for one in report["forecasts"]} == {1, 2}
    assert {one["temperature"] for one in report["forecasts"]} == {0.0, 1.0}
    greedy, sampled = (report["acceptance_by_number"][t] for t in ("0", "1"))
    assert greedy[0] > sampled[0] > 0.3
    largest = [one["tokens_per_round"] for one in report["rounds"] if one["nodes"] == 4 and one["temperature"] == 0]
    assert min(largest) > 1.5
    assert picture.read_bytes().startswith(b"\x89PNG")


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
