"""Packed linears: the same function, put in place of the large ones only."""

from __future__ import annotations

import pytest
import torch

from rootward.engine import packed
from rootward.engine.packed import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no packed linears")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@torch.inference_mode()
def test_packed_equals_plain(bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(70, 50, bias=bias)
    for shape in ((num_rows, 70), (2, num_rows, 70)):
        rows = torch.randn(shape)
        torch.testing.assert_close(PackedLinear(linear)(rows), linear(rows), atol=1e-5, rtol=1e-5)


def test_only_large_float32_layers_are_replaced() -> None:
    network = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(64, 32),
            "small": torch.nn.Linear(4, 4),
            "halved": torch.nn.Linear(64, 64).bfloat16(),
            "body": torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU()),
            "head": torch.nn.Linear(32, 64, bias=False),
        }
    )
    network["head"].weight = network["embed"].weight
    assert pack_linears(network, lambda: torch.zeros(1), min_elements=1000) == 2
    kinds = {name: type(module).__name__ for name, module in network.named_modules()}
    assert kinds["small"] == kinds["halved"] == "Linear"
    assert kinds["body.0"] == kinds["head"] == "PackedLinear"
    assert network["embed"].weight.shape == (64, 32)
    assert "out_features=64" in repr(network["head"])


def test_without_the_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "can_pack", lambda: False)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64))
    assert pack_linears(network, lambda: torch.zeros(1), min_elements=1) == 0
    assert type(network[0]) is torch.nn.Linear


def test_a_network_that_reads_weights_gets_them_back() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(64, 64))
    before = network[0]
    assert pack_linears(network, lambda: network[0].weight.sum(), min_elements=1) == 0
    assert network[0] is before
    values = iter([torch.tensor(1.0), torch.tensor(2.0)])
    assert pack_linears(network, lambda: next(values), min_elements=1) == 0
    assert network[0] is before
