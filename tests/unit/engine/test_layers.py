"""Linear layers and networks of the Llama family on a CPU: the same logits as the network, for those architectures alone whose code is
known, and never unprobed; and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.families import SUPPORTED, Family
from llvmlite.binding import get_host_cpu_features

from rootward.engine import cpu_kernels, cpu_tiles
from rootward.engine.cpu_kernels import Arithmetic
from rootward.engine.layers import Linear, LlamaNetwork, Slice, is_llama, replace_linears
from rootward.engine.model import HuggingFaceModel
from rootward.engine.passes import TreePass
from rootward.ports import COMMITTED, Rows

KINDS = ["llama", "mistral", "qwen2", "qwen3"]
OTHERS = ["gemma", "granite", "olmo2", "phi3", "cohere", "qwen3_moe"]


def network_of(family: Family, seed: int = 3) -> Any:
    """Nothing in it is one or zero by default: norms and biases as well are random."""
    network = family.network(seed)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 1:
                weight.add_(torch.rand_like(weight) - 0.3)
    return network


def model_of(network: Any, fast: bool = True) -> HuggingFaceModel:
    return HuggingFaceModel(network, name="small", max_slots=3, max_len=64, fast=fast)


def logits_of(model: HuggingFaceModel) -> torch.Tensor:
    """Two sessions, of unequal length, with trees of unequal width; some rows are wanted."""
    first, second, rng = model.open(), model.open(), np.random.default_rng(0)
    prompts = [Rows.chain(first, 1, rng.integers(2, 90, 17)), Rows.chain(second, 1, rng.integers(2, 90, 5))]
    found = [model.forward(prompts, num_logits=[1, 2])]
    for slot, last in ((first, 17), (second, 5)):
        model.commit(slot, last, keep_below=False)
    parents = np.array([COMMITTED, 100, 100, 101, 103])
    trees = [Rows(first, np.arange(100, 105), parents, np.arange(20, 25)), Rows.chain(second, 100, [7, 8])]
    found.append(model.forward(trees, num_logits=[5, 2]))
    model.commit(first, 103, keep_below=True)
    found.append(model.forward([Rows.chain(first, 200, [9])], num_logits=[1]))
    return torch.cat(found)


ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MORE = {
    "yarn": Family("LlamaConfig", {"rope_parameters": {**ROPE, "rope_type": "yarn"}, "head_dim": 12}),
    "llama3 rope": Family("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "biases": Family("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "two windows": Family(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
FAMILIES = {kind: SUPPORTED[kind] for kind in KINDS} | MORE


@pytest.mark.parametrize("kind", FAMILIES)
def test_it_computes_what_the_network_computes(kind: str) -> None:
    short, whole = model_of(network_of(FAMILIES[kind])), model_of(network_of(FAMILIES[kind]), fast=False)
    assert short.llama is not None
    assert whole.llama is None
    torch.testing.assert_close(logits_of(short), logits_of(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_run_unchanged(kind: str) -> None:
    assert not is_llama(SUPPORTED[kind].network())


def test_networks_with_another_scale_or_code_run_unchanged() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not is_llama(Family("LlamaConfig", {"rope_parameters": rope}).network())
    network = SUPPORTED["llama"].network()
    network.model.layers[1].mlp.extra = torch.nn.Linear(2, 2)
    assert not is_llama(network)
    elsewhere = type("Other", (type(SUPPORTED["llama"].network()),), {"__module__": "somebody.modeling_llama"})
    assert not is_llama(elsewhere(SUPPORTED["llama"].network().config))


def test_networks_with_changed_modules_run_unchanged() -> None:
    """A short probe does not see all that it may do."""
    changed = SUPPORTED["llama"].network()
    own = type(changed.model.layers[0].self_attn)
    changed.model.layers[1].self_attn.__class__ = type("Longer", (own,), {"__module__": __name__})
    watched, patched, odd = (SUPPORTED["llama"].network() for _ in range(3))
    watched.model.layers[0].register_forward_hook(lambda *_: None)
    patched.model.norm.forward = patched.model.norm.forward
    odd.model.layers[0].mlp.down_proj = torch.nn.Identity()
    for network in (changed, watched, patched, odd):
        assert not is_llama(network)


def test_what_fails_on_the_way_costs_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LlamaNetwork, "__init__", lambda *_: 1 / 0)
    model = model_of(network_of(SUPPORTED["llama"]))
    assert model.llama is None
    assert model.info.supports_trees
    assert "runs as it is" in caplog.text


@pytest.mark.parametrize("what", ["sin", "cos", "error"])
def test_a_wrong_one_is_not_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LlamaNetwork.__call__

    def wrong(self: LlamaNetwork, *args: Any) -> torch.Tensor:
        if what == "error":
            raise RuntimeError("no such operator")
        if what == "sin":
            np.abs(self.rotations.sin, out=self.rotations.sin)
        else:
            self.rotations.cos[:] *= 1.01
        return right(self, *args)

    monkeypatch.setattr(LlamaNetwork, "__call__", wrong)
    model = model_of(network_of(SUPPORTED["llama"]))
    assert model.llama is None
    assert model.info.supports_trees
    assert isinstance(model._pass, TreePass)


def test_weights_are_there_once() -> None:
    """The network's own layers are slices of the joined ones, and compute what they did."""
    network, before = network_of(SUPPORTED["qwen2"]), network_of(SUPPORTED["qwen2"])
    assert replace_linears(network, lambda: network(torch.tensor([[1, 2, 3]])).logits)
    assert not any(type(module) is torch.nn.Linear for module in network.modules())
    attention, own = network.model.layers[0].self_attn, before.model.layers[0].self_attn
    assert isinstance(attention.q_proj, Slice)
    assert attention.q_proj.joined is attention.k_proj.joined is attention.v_proj.joined
    rows = torch.randn(5, 32)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        torch.testing.assert_close(getattr(attention, name)(rows), getattr(own, name)(rows), atol=1e-5, rtol=1e-5)
    assert replace_linears(network, lambda: torch.zeros(1))


def test_a_network_that_reads_weights_gets_them_back() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(64, 64))
    network.config = SUPPORTED["gpt2"].network().config
    before = network[0]
    assert not replace_linears(network, lambda: network[0].weight.double().sum())
    assert network[0] is before
    values = iter([torch.tensor(1.0), torch.tensor(2.0)])
    assert not replace_linears(network, lambda: next(values))
    assert network[0] is before


HAS_BF16_DOT = cpu_tiles.LANES == 16 and get_host_cpu_features().get("avx512bf16", False)
LAYERS = {
    "float32": (torch.float32, None),
    "bfloat16, inputs in float32": (torch.bfloat16, Arithmetic.FLOAT32),
    "bfloat16, inputs rounded": pytest.param(
        (torch.bfloat16, Arithmetic.DOT), marks=pytest.mark.skipif(not HAS_BF16_DOT, reason="no vdpbf16ps")
    ),
    "bfloat16, AMX": pytest.param(
        (torch.bfloat16, Arithmetic.AMX), marks=pytest.mark.skipif(not cpu_kernels.has_amx(), reason="no AMX")
    ),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(96, 70), (96, 64), (cpu_tiles.GROUP + 5, 33), (cpu_tiles.GROUP + 5, 160), (1, 2)])
@torch.inference_mode()
def test_a_row_of_a_linear_layer_has_the_same_bits_beside_any_others(
    shape: tuple[int, int], layer: tuple[torch.dtype, Arithmetic | None], bias: bool
) -> None:
    dtype, arithmetic = layer
    rng = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(num, shape[1], generator=rng).to(dtype) for num in (shape[0], 300))
    bias_O = torch.randn(shape[0], generator=rng).to(dtype) if bias else None
    linear = Linear(weight, bias_O, arithmetic=arithmetic)
    exact = rows.double() @ weight.double().T + (0 if bias_O is None else bias_O.double())
    expected = linear(rows)
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(expected.double(), exact, atol=rounding * 10, rtol=rounding)
    for num in (0, 1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 50, 299):
        for start in (0, 1, 300 - num):
            assert torch.equal(linear(rows[start : start + num]), expected[start : start + num])
    outputs = torch.tensor([0, shape[0] - 1])
    assert torch.equal(linear.weight_of(outputs), weight[outputs])


needs_bf16_dot = pytest.mark.skipif(not HAS_BF16_DOT, reason="no vdpbf16ps")


def weight_with_outliers(num_out: int, num_in: int) -> torch.Tensor:
    """Normal weights and outliers: at both ends, several in one block, infinite ones, and NaNs."""
    weight = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(1)).mul(0.05).bfloat16()
    values = [0.0, -0.0, 1e-40, -3e38, math.inf, -math.inf, 1e-20, 2.0**100]
    places = [(0, 0), (0, 1), (num_out - 1, 0), (0, num_in - 1), (1, 2), (2, 2), (3, num_in - 2)]
    for (o, i), value in zip([*places, (num_out - 1, num_in - 1)], values, strict=True):
        weight[o, i] = value
    weight.view(torch.int16)[4, 3], weight.view(torch.int16)[4, 4] = 0x7FC1, -1  # NaNs
    return weight


@needs_bf16_dot
@pytest.mark.parametrize("shape", [(2 * cpu_tiles.GROUP, 512), (cpu_tiles.GROUP + 5, 1160), (cpu_tiles.GROUP, 1023)])
def test_compact_weights_are_exact(shape: tuple[int, int]) -> None:
    weight = weight_with_outliers(*shape)
    words = cpu_kernels.packed(weight)
    smaller = cpu_kernels.compact(words)
    assert smaller.nbytes < 0.77 * words.nbytes
    np.testing.assert_array_equal(cpu_kernels.expanded(smaller, shape[1]), words)
    layer = Linear(weight, None, arithmetic=Arithmetic.DOT, compact=True)
    outputs = torch.tensor([0, 4, shape[0] - 1])
    assert layer.is_compact
    assert torch.equal(layer.weight_of(outputs).view(torch.int16), weight[outputs].view(torch.int16))
    layer.expand()
    assert not layer.is_compact
    np.testing.assert_array_equal(layer.packed, words)


@needs_bf16_dot
@pytest.mark.parametrize("shape", [(2 * cpu_tiles.GROUP, 512), (cpu_tiles.GROUP + 5, 1160), (cpu_tiles.GROUP, 1023)])
@torch.inference_mode()
def test_compact_weights_give_the_same_bits_as_the_weights_themselves(shape: tuple[int, int]) -> None:
    rows, bias = torch.randn(299, shape[1]), torch.randn(shape[0])
    weight = weight_with_outliers(*shape).nan_to_num(1e10, 1e30, -1e20)
    compact, plain = (Linear(weight, bias, arithmetic=Arithmetic.DOT, compact=flag) for flag in (True, False))
    assert compact.is_compact
    assert not plain.is_compact
    expected = plain(rows)
    for num in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 299):
        for start in {0, 299 - num}:
            assert torch.equal(compact(rows[start : start + num]), expected[start : start + num])


@needs_bf16_dot
def test_weights_that_do_not_become_smaller_stay_as_they_are() -> None:
    any_bits = torch.randint(-(1 << 15), 1 << 15, (cpu_tiles.GROUP, 512), dtype=torch.int16).view(torch.bfloat16)
    assert not Linear(any_bits, None, arithmetic=Arithmetic.DOT, compact=True).is_compact
    part_of_a_block = torch.zeros(cpu_tiles.GROUP, 516, dtype=torch.bfloat16)
    assert not Linear(part_of_a_block, None, arithmetic=Arithmetic.DOT, compact=True).is_compact
    in_float32 = torch.zeros(cpu_tiles.GROUP, 512, dtype=torch.bfloat16)
    assert not Linear(in_float32, None, arithmetic=Arithmetic.FLOAT32, compact=True).is_compact


@needs_bf16_dot
def test_all_layers_of_a_network_have_compact_weights_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "bf16_arithmetic", lambda: Arithmetic.DOT)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for num_in, is_compact in ((128, True), (124, False)):
        layers = torch.nn.Linear(64, num_in), torch.nn.Linear(num_in, 64)
        network = torch.nn.Sequential(*layers).to(torch.bfloat16)
        network.config = SUPPORTED["gpt2"].network().config
        rows = torch.randn(3, 64, dtype=torch.bfloat16)
        assert replace_linears(network, lambda network=network, rows=rows: network(rows))
        assert [linear.is_compact for linear in network] == [is_compact] * 2


@needs_bf16_dot
@pytest.mark.parametrize("threads", [1, 2])
def test_weights_are_compact_where_threads_share_the_bandwidth(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight = torch.randn(cpu_tiles.GROUP, 64).bfloat16()
    assert Linear(weight, None, arithmetic=Arithmetic.DOT).is_compact == (threads > 1)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_output_is_computed_whatever_the_number_of_threads(threads: int) -> None:
    """Of six groups of outputs; a thread that has finished its own share takes groups of other shares."""
    weight = torch.randn(5 * cpu_tiles.GROUP + 1, 12)
    x, bias = np.ones((3, 12), np.float32), cpu_kernels.packed_bias(None, len(weight))
    out = np.full((3, len(weight)), np.nan, np.float32)
    cpu_kernels.linear(x, cpu_kernels.packed(weight), bias, out, threads)
    np.testing.assert_allclose(out, np.tile(weight.sum(1).numpy(), (3, 1)), rtol=1e-4, atol=1e-5)


@needs_bf16_dot
def test_processes_of_a_machine_agree_on_how_bfloat16_is_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one measures; the others read its choice, whatever they would measure."""
    monkeypatch.setattr(cpu_kernels.numba.config, "CACHE_DIR", str(tmp_path))
    measured = iter([0.5, 2.0])
    monkeypatch.setattr(cpu_kernels, "_gain_of_bf16_dot", lambda: next(measured))
    assert not cpu_kernels.has_fast_bf16_dot.__wrapped__()
    assert not cpu_kernels.has_fast_bf16_dot.__wrapped__()
    next(tmp_path.iterdir()).write_text("no number")
    assert cpu_kernels.has_fast_bf16_dot.__wrapped__()


@pytest.mark.skipif(not cpu_kernels.has_amx(), reason="no AMX")
def test_amx_is_used_only_where_the_operating_system_grants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Denying:
        def syscall(self, *_: int) -> int:
            return -1

    monkeypatch.setattr(cpu_kernels.ctypes, "CDLL", lambda _: Denying())
    assert not cpu_kernels.has_amx.__wrapped__()


@pytest.mark.parametrize(
    ("amx", "dot", "arithmetic"),
    [(True, True, Arithmetic.AMX), (False, True, Arithmetic.DOT), (False, False, Arithmetic.FLOAT32)],
)
def test_bfloat16_is_multiplied_in_the_fastest_way_that_there_is(
    amx: bool, dot: bool, arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "has_amx", lambda: amx)
    monkeypatch.setattr(cpu_kernels, "has_fast_bf16_dot", lambda: dot)
    assert cpu_kernels.bf16_arithmetic.__wrapped__() is arithmetic


@pytest.mark.skipif(not cpu_kernels.has_amx(), reason="no AMX")
def test_layers_whose_inputs_do_not_fill_matrix_registers_do_without_amx() -> None:
    one = torch.zeros(3, 66, dtype=torch.bfloat16)
    assert Linear(one, None, arithmetic=Arithmetic.AMX).arithmetic is Arithmetic.DOT
    assert Linear(one[:, :64], None, arithmetic=Arithmetic.AMX).arithmetic is Arithmetic.AMX


SHAPES = {
    "llama": {},
    "grouped by three": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 136,
    },
    "one head each": {"num_key_value_heads": 4},
    "windows": {"sliding_window": 6},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_to_a_token_gives_the_same_bits(shape: str, dtype: torch.dtype) -> None:
    """Alone, in chunks of any size, below siblings, kept below a commit, and in a batch with others."""
    kind = "MistralConfig" if shape == "windows" else "LlamaConfig"
    network = network_of(Family(kind, SHAPES[shape])).to(dtype)
    model = HuggingFaceModel(network, name="small", max_slots=4, max_len=96)
    assert model.llama is not None
    rng = np.random.default_rng(1)
    text = rng.integers(2, 90, 40).tolist()
    expected = plain(model, text)
    for sizes in ([40], [1, 2, 3, 5, 29], [17, 23]):
        assert torch.equal(in_chunks(model, text, sizes), expected)
    assert torch.equal(side_by_side(model, text, rng), expected)
    slot, other = model.open(), model.open()
    model.forward([Rows.chain(other, 0, rng.integers(2, 90, 31))], num_logits=[1])
    model.commit(other, 30, keep_below=False)
    at, found = 0, []
    for depth in (6, 1, 9, 4, 11, 9):
        rows, path = tree_with(rng, slot, text[at : at + depth])
        beside = tree_with(rng, other, rng.integers(2, 90, 3).tolist())[0]
        batch = [beside, rows] if depth % 2 else [rows]
        logits = model.forward(batch)[-len(rows.node) :]
        found.append(logits[path])
        model.release(other)
        model.commit(slot, int(rows.node[path[-1]]), keep_below=False)
        at += depth
    assert torch.equal(torch.cat(found), expected)


def plain(model: HuggingFaceModel, text: list[int]) -> torch.Tensor:
    return in_chunks(model, text, [1] * len(text))


def in_chunks(model: HuggingFaceModel, text: list[int], sizes: list[int]) -> torch.Tensor:
    slot, found, at = model.open(salt=str(sizes)), [], 0
    for size in sizes:
        found.append(model.forward([Rows.chain(slot, 0, text[at : at + size])]))
        model.commit(slot, size - 1, keep_below=False)
        at += size
    model.close(slot)
    return torch.cat(found)


def side_by_side(model: HuggingFaceModel, text: list[int], rng: np.random.Generator) -> torch.Tensor:
    """Token by token, in steps with two other sessions of other lengths."""
    slots, found = [model.open() for _ in range(3)], []
    for slot, num in zip(slots[1:], (3, 20), strict=True):
        model.forward([Rows.chain(slot, 0, rng.integers(2, 90, num))], num_logits=[1])
        model.commit(slot, num - 1, keep_below=False)
    for token in text:
        others = [Rows.chain(slot, 0, [7]) for slot in slots[1:]]
        found.append(model.forward([others[0], Rows.chain(slots[0], 0, [token]), others[1]])[1:2])
        for slot in slots:
            model.commit(slot, 0, keep_below=False)
    for slot in slots:
        model.close(slot)
    return torch.cat(found)


def tree_with(rng: np.random.Generator, slot: int, path: list[int]) -> tuple[Rows, list[int]]:
    """A tree in which these tokens are one path, and where its nodes are: siblings come before and after them, and have children."""
    parent, token, at, last = [], [], [], COMMITTED
    for wanted in path:
        for _ in range(int(rng.integers(0, 3))):
            parent.append(int(rng.choice([last, *range(len(token))])))
            token.append(int(rng.integers(2, 90)))
        at.append(len(token))
        parent.append(last)
        token.append(wanted)
        last = at[-1]
    parent.append(last)
    token.append(5)
    return Rows(slot, np.arange(len(token)), np.array(parent), np.array(token)), at
