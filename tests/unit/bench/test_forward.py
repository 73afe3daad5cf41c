"""`benchmarks.forward`: what is measured, on the shipped target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.forward import FORWARD, ONEDNN, OWN, WHOLE_WEIGHTS, expanded, linears, main
from rootward import demo
from rootward.engine.cpu_kernels import Arithmetic, has_fast_bf16_dot
from rootward.engine.layers import Linear
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


@pytest.mark.skipif(not has_fast_bf16_dot(), reason="vdpbf16ps is not used here")
def test_both_forms_of_weights_are_timed_where_both_are_used(tmp_path: Path) -> None:
    out, model = tmp_path / "result.json", str(demo.paths().target)
    flags = ["--dtypes", "bfloat16", "--rows", "3", "--context", "5", "--threads", "2", "--seconds", "0.01"]
    assert main(["--model", model, *flags, "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text())["ms"].values()
    assert (WHOLE_WEIGHTS in found) == any(layer.is_compact for layer in linears(load_model(model, dtype="bfloat16")))
    weight = torch.randn(48, 64).bfloat16()
    layer = Linear(weight, None, arithmetic=Arithmetic.DOT, compact=True)
    (other,) = expanded([layer])
    assert layer.is_compact
    assert not other.is_compact
    rows = torch.randn(3, 64).bfloat16()
    np.testing.assert_array_equal(layer.product(layer.array_of(rows)), other.product(other.array_of(rows)))


def test_joined_layers_count_once() -> None:
    model = load_model(str(demo.paths().target), max_slots=1, max_len=16)
    config = model.network.config
    assert len(linears(model)) == 4 * config.num_hidden_layers + 1
