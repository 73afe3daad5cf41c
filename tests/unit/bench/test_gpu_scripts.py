"""Smoke runs of the GPU scripts on a CPU: they complete, report the expected rows and import no RPC code. Times are not asserted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
COMMON_FIELDS = {"check", "target", "environment", "device", "dtype", "smoke", "attention", "cuda_graphs", "parameters"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TIMES = {"ms", "ms_low", "ms_high"}
WITHOUT_RPC = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("grpc", "google.protobuf", "redis", "rootward.v1")):
            raise ImportError(f"{name} belongs to the rpc layer")
sys.meta_path.insert(0, Blocked())
from benchmarks.gpu import attention, engine_steps, growth, plain_decoding, verification, verify_rows
plain_decoding.main(["--smoke", "--out", sys.argv[1]])
"""


@pytest.fixture(scope="module", autouse=True)
def _script_environment():
    """Make `benchmarks` importable, and restore the gradient mode that the scripts switch off."""
    gradients = torch.is_grad_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield
    torch.set_grad_enabled(gradients)


def checked_report(path: Path, printed: str, columns: tuple[str, ...]) -> dict:
    """The JSON report, after a check that the printed table has the same rows."""
    report = json.loads(path.read_text())
    lines = [line.split(" | ") for line in printed.splitlines() if " | " in line]
    assert lines[0] == list(columns)
    assert [len(line) for line in lines] == [len(columns)] * (1 + len(report["rows"]))
    return report


def columns_of(report: dict, *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in report["rows"]]


def test_plain_decoding_runs_and_nothing_imports_the_rpc_layer(tmp_path):
    out = tmp_path / "plain.json"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RPC, str(out)],
        cwd=ROOT,
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    from benchmarks.gpu.plain_decoding import COLUMNS

    report = checked_report(out, done.stdout, COLUMNS)
    assert set(report) == COMMON_FIELDS | {"bandwidth_GB_s", "weight_bytes_read", "rows", "reached"}
    assert columns_of(report, "sessions", "temperature") == list(itertools.product((1, 2), (0.0, 1.0)))
    assert set(report["rows"][0]) == set(COLUMNS) | TIMES
    embeddings = 256 * 64  # parameters of the input embeddings, which a step does not read
    assert report["weight_bytes_read"] == 4 * (report["parameters"] - embeddings)
    assert "no verdict" in done.stdout


def test_verify_rows_compares_every_width_with_one_row(tmp_path, capsys):
    from benchmarks.gpu import verify_rows

    verify_rows.main(["--smoke", "--out", str(tmp_path / "rows.json")])
    report = checked_report(tmp_path / "rows.json", capsys.readouterr().out, verify_rows.COLUMNS)
    assert columns_of(report, "sessions", "temperature", "rows") == list(itertools.product((1, 2), (0.0, 1.0), (1, 32)))
    assert all(row["ratio"] == row["forward_ratio"] == 1.0 for row in report["rows"] if row["rows"] == 1)
    assert set(report["rows"][0]) == set(verify_rows.COLUMNS) | TIMES


def test_drawn_trees_have_the_requested_number_of_rows():
    from benchmarks.gpu.large import TINY, random_network
    from benchmarks.gpu.measuring import drawn
    from rootward.engine.model import HuggingFaceModel

    model = HuggingFaceModel(random_network(TINY, "cpu", torch.float32, 64), name="tiny", max_slots=1, fast=False)
    assert drawn(model, 9, 1, seed=0) is None
    snapshot = drawn(model, 9, 32, seed=0)
    assert len(snapshot.tree) == 32
    inner = set(snapshot.tree.parent[1:].tolist())
    assert {node for node, row in enumerate(snapshot.rows) if row is not None} == inner


def test_growth_replays_cuda_graphs_with_the_same_levels_and_rows(tmp_path, capsys):
    from benchmarks.gpu import growth

    growth.main(["--smoke", "--out", str(tmp_path / "growth.json")])
    report = checked_report(tmp_path / "growth.json", capsys.readouterr().out, growth.COLUMNS)
    draft_modes = ("greedy", "top_k", "coupled")
    assert columns_of(report, "recorded", "law", "sessions") == list(
        itertools.product((False, True), draft_modes, (1, 2))
    )
    assert report["steps"]["replayed"] > report["steps"]["other"] > 0
    launched, replayed = report["rows"][:6], report["rows"][6:]
    assert [(row["levels"], row["rows"]) for row in launched] == [(row["levels"], row["rows"]) for row in replayed]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it exists for Linux only")
def test_attention_is_correct_in_the_triton_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.attention", "--smoke"],
        cwd=ROOT,
        env=os.environ | ONE_THREAD | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "ok"


def test_engine_steps_counts_its_rows(tmp_path, capsys):
    from benchmarks.gpu import engine_steps

    engine_steps.main(["--smoke", "--out", str(tmp_path / "steps.json")])
    report = checked_report(tmp_path / "steps.json", capsys.readouterr().out, engine_steps.COLUMNS)
    assert columns_of(report, "sessions", "rows") == [(1, 1), (1, 4)]
    assert report["relative_error"] < 1e-6
    assert report["reached"]


def test_verdicts_of_device_and_host_are_equal(tmp_path, capsys):
    from benchmarks.gpu import verification

    report = verification.main(["--smoke", "--out", str(tmp_path / "verdicts.json")])
    assert json.loads((tmp_path / "verdicts.json").read_text()) == report
    assert [(row["rule"], row["trees"]) for row in report["rows"]] == [("token", 2), ("traversal", 2)]
    assert all(row["same_stop"] == row["same_bonus"] == 1.0 for row in report["rows"])
    assert report["reached"]
    assert "rule | trees | same_stop" in capsys.readouterr().out
