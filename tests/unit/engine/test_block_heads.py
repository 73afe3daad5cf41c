"""Block heads as they are published (DFlash) give the marginals of the published formula; files of other heads are refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import dflash
from torch.nn.functional import linear, silu
from unit.engine import networks

from rootward.core.frames import Features, Open
from rootward.core.requests import DraftMode, DraftStrategy, Sampling
from rootward.engine import head_weights
from rootward.engine.block_head_model import BlockHeadModel
from rootward.engine.grower import Grower
from rootward.engine.head_loading import acceptance, load_head_apart, load_head_model
from rootward.engine.heads import load_head
from rootward.engine.model import HuggingFaceModel
from rootward.errors import ConfigurationError
from rootward.ports import Rows

DRAFT_IDS = [33, 40, 3, 4, 7, 11, 12, 20]
TEXT = [5, 9, 2, 31, 17, 8, 40, 3, 22]
MASK, BLOCK = 2, 4


def a_target() -> Any:
    return networks.tiny("LlamaConfig", num_hidden_layers=6)


def a_model(max_slots: int = 4) -> HuggingFaceModel:
    return HuggingFaceModel(a_target(), name="target", max_slots=max_slots, max_len=64)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Reference:
    """The published formula for one block, without a cache: keys and values of the context and of the block side by side."""

    def __init__(self, folder: Path, network: Any) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.layers, self.own = raw.get("transformer_layer_config", raw), raw
        self.w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.network = network
        self.theta = self.layers.get("rope_theta") or self.layers["rope_parameters"]["rope_theta"]

    def states(self, text: list[int]) -> torch.Tensor:
        """What the target's layers put out, side by side, at every position."""
        hidden = self.network(torch.tensor([text]), output_hidden_states=True).hidden_states
        if "dflash_config" in self.own:
            return torch.cat([hidden[i + 1][0] for i in self.own["dflash_config"]["target_layer_ids"]], -1)
        return torch.cat([hidden[i][0] for i in self.own["aux_hidden_state_layer_ids"]], -1)

    def marginals(self, text: list[int]) -> torch.Tensor:
        """[B - 1, V] of the tokens after this text, of whose last token the target knows nothing yet."""
        w, num = self.w, len(text) - 1
        context = rms(linear(self.states(text)[:num], w["fc.weight"]), w["hidden_norm.weight"])
        embedding = self.network.get_input_embeddings()
        x = embedding(torch.tensor([text[-1], *[MASK] * (BLOCK - 1)]))
        for i in range(self.layers["num_hidden_layers"]):
            x = self.layer(i, x, context)
        out = rms(x, w["norm.weight"])[1:]
        if "d2t" not in w:
            return linear(out, self.network.lm_head.weight)
        logits = torch.full((BLOCK - 1, len(embedding.weight)), -torch.inf)
        logits[:, torch.arange(len(w["d2t"])) + w["d2t"].long()] = linear(out, w["lm_head.weight"])
        return logits

    def layer(self, i: int, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        w = {n.removeprefix(f"layers.{i}."): t for n, t in self.w.items() if n.startswith(f"layers.{i}.")}
        num_q, num_kv = self.layers["num_attention_heads"], self.layers["num_key_value_heads"]
        dim = self.layers["head_dim"]

        def heads(of: torch.Tensor, name: str) -> torch.Tensor:
            product = linear(of, w[f"self_attn.{name}_proj.weight"], w.get(f"self_attn.{name}_proj.bias"))
            return product.view(len(of), -1, dim)

        def turned(t: torch.Tensor, first: int) -> torch.Tensor:
            position = torch.arange(first, first + len(t))
            angle = position[:, None] * self.theta ** (-torch.arange(0, dim, 2) / dim)
            cos, sin = (torch.cat([of, of], -1)[:, None] for of in (angle.cos(), angle.sin()))
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat([-b, a], -1) * sin

        read = torch.cat([context, rms(x, w["input_layernorm.weight"])])
        block = read[len(context) :]
        q = turned(rms(heads(block, "q"), w["self_attn.q_norm.weight"]), len(context))
        k = turned(rms(heads(read, "k"), w["self_attn.k_norm.weight"]), 0).repeat_interleave(num_q // num_kv, 1)
        v = heads(read, "v").repeat_interleave(num_q // num_kv, 1)
        score = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        weight = score.masked_fill(~self.sees(i, len(context)), -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weight, v).flatten(1)
        x = x + linear(attended, w["self_attn.o_proj.weight"], w.get("self_attn.o_proj.bias"))
        inner = rms(x, w["post_attention_layernorm.weight"])
        gate, up = linear(inner, w["mlp.gate_proj.weight"]), linear(inner, w["mlp.up_proj.weight"])
        return x + linear(silu(gate) * up, w["mlp.down_proj.weight"])

    def sees(self, i: int, num: int) -> torch.Tensor:
        sees = torch.ones(BLOCK, num + BLOCK, dtype=torch.bool)
        if window := self.own.get("dflash_config", {}).get("swa_window_size"):
            sees[:, :num] = torch.arange(num) > torch.arange(num, num + BLOCK)[:, None] - window
        if self.layers.get("layer_types", ["full_attention"] * 9)[i] == "sliding_attention":
            behind = torch.arange(num, num + BLOCK)[:, None] - torch.arange(num + BLOCK)
            causal = not self.own.get("sliding_window_non_causal")
            sees = (behind >= 0 if causal else sees) & (behind.abs() < self.layers["sliding_window"])
        return sees


def drafts_of(folder: Path, model: HuggingFaceModel) -> BlockHeadModel:
    return BlockHeadModel(load_head(str(folder), model.network), model.info, name="head", max_slots=4)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 3}
KINDS: dict[str, dict[str, Any]] = {
    "z-lab": {"rope_theta": 700.0},
    "z-lab with biases, its last layer that of the target": {"bias": True, "layer_ids": (1, 5)},
    "z-lab with sliding windows": SLIDING,
    "speculators": {
        "speculators": True,
        "draft_ids": DRAFT_IDS,
        "layer_ids": (1, 3, 5),
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "speculators with the whole vocabulary": {"speculators": True, "layer_ids": (1, 3, 5), **SLIDING},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_one_pass_gives_the_marginals_of_the_published_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(head_weights, "SERVED", ())
    check_marginals(dflash(tmp_path, a_target(), **KINDS[kind]), a_model(), a_target())


def test_rows_of_a_target_that_scales_its_embedding_are_scaled(tmp_path: Path) -> None:
    """As the published code does, which calls the target's module; without that hardly a token was that of the head."""

    def target() -> Any:
        return networks.tiny("Gemma3TextConfig", num_hidden_layers=6, head_dim=8)

    assert target().get_input_embeddings().scalar_embed_scale > 2
    model = HuggingFaceModel(target(), name="target", max_slots=4, max_len=64)
    check_marginals(dflash(tmp_path, target()), model, target())


@torch.inference_mode()
def test_a_window_of_all_layers_is_one_of_the_context(tmp_path: Path) -> None:
    """As Model-Optimizer exports it: within the block every position sees every other."""
    own = {"use_swa": True, "swa_window_size": BLOCK + 1, "causal": False}
    folder = changed(dflash(tmp_path, a_target()), dflash_config=own, sliding_window=BLOCK + 1)
    check_marginals(folder, a_model(), a_target())


def check_marginals(folder: Path, model: HuggingFaceModel, network: Any) -> None:
    drafts, reference = drafts_of(folder, model), Reference(folder, network)
    model.expose(drafts.reads)
    slot = model.open()
    model.forward([Rows.chain(slot, 0, TEXT)], num_logits=[1])
    torch.testing.assert_close(model.states, reference.states(TEXT), atol=1e-4, rtol=1e-4)
    features = drafts.fuse(model.states)

    # the text in two parts
    own = drafts.open()
    for begin, end in ((0, 5), (5, len(TEXT) - 1)):
        chain = Rows.chain(own, 1000, TEXT[1:][begin:end], features[begin:end].numpy())
        found = drafts.forward([chain], num_logits=[1])
        drafts.commit(own, 1000 + end - begin - 1, keep_below=False)
    torch.testing.assert_close(found, reference.marginals(TEXT), atol=2e-4, rtol=2e-4)

    # the first marginal after every position, as the load probe asks
    drafts.head.depth = 1
    other = drafts.open()
    every = drafts.forward([Rows.chain(other, 1, TEXT[1:], features[:-1].numpy())])
    expected = torch.stack([reference.marginals(TEXT[: i + 2])[0] for i in range(len(TEXT) - 1)])
    torch.testing.assert_close(every, expected, atol=2e-4, rtol=2e-4)


@torch.inference_mode()
def test_sessions_of_one_batch_have_what_each_has_alone(tmp_path: Path) -> None:
    model = a_model()
    drafts = drafts_of(dflash(tmp_path, model.network), model)
    random = np.random.default_rng(0)
    texts = [list(map(int, random.integers(0, 90, num))) for num in (3, 12, 7)]
    features = [random.standard_normal((len(text), drafts.feature_size)).astype(np.float32) for text in texts]

    def chains() -> list[Rows]:
        return [Rows.chain(drafts.open(), 1, text, own) for text, own in zip(texts, features, strict=True)]

    def end() -> None:
        for slot in range(3):
            drafts.close(slot)

    alone = torch.cat([drafts.forward([rows], num_logits=[1]) for rows in chains()])
    end()
    for layer in drafts._kv.layers:  # cells that nobody has written are read by nobody
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    together = drafts.forward(chains(), num_logits=[1] * 3)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert together.shape == (3 * (BLOCK - 1), model.info.vocab_size)
    end()
    drafts.check_idle()


@pytest.mark.parametrize("strategy", ["best_first", "marginals", "rsd_s:4,9"])
def test_a_tree_is_grown_with_one_pass_and_no_deeper_than_the_block(tmp_path: Path, strategy: str) -> None:
    model = a_model()
    drafts = drafts_of(dflash(tmp_path, model.network, scale=0.3), model)
    grower: Grower[int] = Grower(drafts, incarnation=1)
    asked = DraftStrategy.parse(strategy)
    shape = {"num_atoms": 8, "node_cap": 40, "max_depth": 9, "topk": 9, "strategy": asked}
    mode = asked.mode or DraftMode.TOP_K
    assert (
        grower.open(1, Open(0, 0, tuple(TEXT), Sampling(temperature=0.1), mode, 1, 0, num_features=8, **shape)) is None
    )
    features = np.random.default_rng(0).standard_normal((8, drafts.feature_size)).astype(np.float32)
    for part in Features(features).chunks(0, len(TEXT)):
        grower.add_features(1, part)
    forward, logits = drafts.forward, []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        slot = drafts.open()
        (rows,) = args[0]
        logits.append(forward([replace(rows, slot=slot)], num_logits=[1]))
        drafts.release(slot)
        drafts.close(slot)
        return forward(*args, **kwargs)

    drafts.forward = counted  # type: ignore[method-assign]
    grower.grow([1])
    (marginals,) = logits
    tree = grower.trees[1].tree
    snapshot = tree.snapshot(40)
    paths = [snapshot.tree.path(i) for i in range(1, len(snapshot.tree))]
    assert max(map(len, paths)) == BLOCK - 1
    if mode is DraftMode.TOP_K:  # DDTree: the most probable paths among the likeliest tokens of each position
        atoms = [row.topk(8).indices.tolist() for row in marginals]
        law = (marginals / 0.1).softmax(-1)
        law = torch.stack([law[d] / law[d, atoms[d]].sum() for d in range(BLOCK - 1)])
        chance = {
            path: float(np.prod([law[d, token] for d, token in enumerate(path)]))
            for depth in range(1, BLOCK)
            for path in itertools.product(*atoms[:depth])
        }
        best = sorted(chance, key=lambda path: -chance[path])[: len(paths)]
        assert len(paths) == 40
        assert sum(chance[tuple(path)] for path in paths) == pytest.approx(sum(chance[path] for path in best), rel=1e-3)


def changed(folder: Path, **config: Any) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    own = config.pop("dflash_config", {})
    if own or "dflash_config" in raw:
        raw["dflash_config"] = raw.get("dflash_config", {}) | own
    path.write_text(json.dumps(raw | config))
    return folder


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        load_head(str(folder), a_target())


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"dflash_config": {"target_layer_ids": [0, 6]}}, r"target_layer_ids: \[0, 6\]; the target has 6 layers"),
    ({"dflash_config": {"target_layer_ids": [-1, 2]}}, "target_layer_ids"),
    ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids"),
    ({"dflash_config": {"mask_token_id": 96}}, "mask_token_id: 96"),
    ({"dflash_config": {"mask_token_id": None}}, "mask_token_id: None"),
    ({"block_size": 1}, "block_size: 1"),
    ({"block_size": 1 << 20}, "block_size"),
    ({"dflash_config": {"selector_rank": 8}}, "dflash_config: selector_rank"),
    ({"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier: 0.5"),
    ({"dflash_config": {"use_swa": True}}, "use_swa"),
    ({"dflash_config": {"use_swa": True, "swa_window_size": 0}}, "use_swa: True"),
    ({"architectures": ["QwenDFlareDraftModel"]}, "architectures: QwenDFlareDraftModel"),
    ({"sample_from_anchor": True}, "sample_from_anchor"),
    ({"projector_type": "domino"}, "projector_type: 'domino'"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"architectures": ["DFlash2DraftModel"]}, "architectures: DFlash2DraftModel"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ({"speculators_config": {"proposal_methods": [{"verifier_accept_k": 3}]}}, "verifier_accept_k.*lossy"),
    ({"speculators_config": {"proposal_methods": [{"accept_tolerance": 0.1}]}}, "accept_tolerance.*lossy"),
]


@pytest.mark.parametrize(("change", "match"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_options_of_other_heads_are_refused_by_name(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    refused(changed(dflash(tmp_path, a_target()), **change), match)


def test_names_and_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    unset = {"projector_type": None, "use_swa": False, "swa_window_size": None}
    folder = changed(dflash(tmp_path, a_target()), architectures=["QwenDFlashDraftModel"], dflash_config=unset)
    rope = {kind: {"rope_type": "default", "rope_theta": 300.0} for kind in ("full_attention", "sliding_attention")}
    load_head(str(changed(folder, rope_parameters=rope, rope_theta=None)), a_target())


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.1.self_attn.k_norm.weight",
        "layers.0.mlp.up_proj.weight",
    ],
)
def test_missing_and_misshapen_tensors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = dflash(tmp_path, a_target())
    weights = load_file(folder / "model.safetensors")
    save_file({own: t for own, t in weights.items() if own != name}, folder / "model.safetensors")
    refused(folder, f"tensor {name} is missing")
    save_file(weights | {name: torch.zeros(5)}, folder / "model.safetensors")
    refused(folder, f"{name}: shape")


def test_a_tensor_of_another_head_is_refused(tmp_path: Path) -> None:
    folder = dflash(tmp_path, a_target())
    weights = load_file(folder / "model.safetensors") | {"layers.0.mlp_conv.base_kernel": torch.zeros(2)}
    save_file(weights, folder / "model.safetensors")
    refused(folder, "mlp_conv")
    (folder / "mask_embedding.pt").touch()
    refused(folder, "mask_embedding.pt")


@pytest.mark.parametrize("kind", ["z-lab", "speculators"])
def test_a_block_head_apart_from_its_target_drafts_as_beside_it(tmp_path: Path, kind: str) -> None:
    network = a_target()
    network.save_pretrained(tmp_path / "target")
    folder = dflash(tmp_path / "head", network, **KINDS[kind])
    apart = load_head_apart(str(folder), str(tmp_path / "target"), dtype="float32", max_slots=1, max_len=64)
    features = np.random.default_rng(1).normal(size=(6, apart.feature_size)).astype(np.float32)
    beside = drafts_of(folder, a_model())
    rows = [drafts.forward([Rows.chain(drafts.open(), 0, TEXT[:6], features)]) for drafts in (beside, apart)]
    torch.testing.assert_close(*rows)


def test_the_load_probe_measures_acceptance_under_both_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, network = a_model(), a_target()
    folder = dflash(tmp_path, network, layer_ids=(0, 2, 5))
    head, reference = load_head(str(folder), model.network), Reference(folder, network)
    assert head.readings == [(1, 3, 6), (0, 2, 5)]
    text = [*TEXT, *TEXT[::-1], *TEXT]
    target = network(torch.tensor([text])).logits[0].softmax(-1)
    overlaps = [
        torch.minimum(reference.marginals(text[: i + 1])[0].softmax(-1), target[i]).sum() for i in range(1, len(text))
    ]
    assert acceptance(head, model, text) == pytest.approx(torch.stack(overlaps).mean().item(), abs=1e-4)
    model.check_idle()
    with caplog.at_level("INFO"), monkeypatch.context() as patch:
        patch.setattr("rootward.engine.head_loading.LEAST_ACCEPTANCE", 0.0)
        drafts = load_head_model(str(folder), model, max_slots=1, max_depth=2)
    assert isinstance(drafts, BlockHeadModel)
    assert drafts.head.depth == 2
    assert "(1, 3, 6)" in caplog.text
    assert "(0, 2, 5)" in caplog.text
    monkeypatch.setattr("rootward.engine.head_loading.LEAST_ACCEPTANCE", 1.0)
    with pytest.raises(ConfigurationError, match="another target"):
        load_head_model(str(folder), model, max_slots=1)
