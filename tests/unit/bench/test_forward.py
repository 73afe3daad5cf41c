"""`benchmarks.forward`: what is measured, on the shipped target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.forward import FORWARD, ONEDNN, OWN, linears, main
from rootward import demo
from rootward.engine.loading import load_model


def test_forward_and_its_linear_layers_are_timed_by_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    flags = ["--rows", "1", "3", "--context", "5", "--threads", "1", "--seconds", "0.01", "--out", str(out)]
    assert main(["--model", str(demo.paths().target), *flags]) == 0
    found = json.loads(out.read_text())["ms"]
    assert set(found) == {"float32", "bfloat16"}
    assert ONEDNN in found["float32"]  # in bfloat16 it has kernels on some processors only
    for by_name in found.values():
        assert {FORWARD, OWN} <= set(by_name) <= {FORWARD, OWN, ONEDNN}
        assert all(by_rows[rows] > 0.0 for by_rows in by_name.values() for rows in ("1", "3"))
    assert "share of the linear layers" in capsys.readouterr().out


def test_joined_layers_count_once() -> None:
    model = load_model(str(demo.paths().target), max_slots=1, max_len=16)
    config = model.network.config
    assert len(linears(model)) == 4 * config.num_hidden_layers + 1
