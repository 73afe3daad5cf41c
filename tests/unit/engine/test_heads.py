"""Draft heads as they are published compute the published formula on text and down a tree; files of other heads are refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import eagle1, eagle3
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import linear, silu
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from unit.engine import networks

from rootward.core.requests import Sampling
from rootward.engine import head_weights
from rootward.engine.atoms import atoms_of
from rootward.engine.cpu_kernels import array_of, head_inputs
from rootward.engine.head_loading import acceptance, fingerprint, load_head_apart, load_head_model
from rootward.engine.head_model import HeadModel
from rootward.engine.heads import load_head
from rootward.engine.model import HuggingFaceModel
from rootward.errors import ConfigurationError
from rootward.ports import COMMITTED, Rows

DRAFT_IDS = [3, 4, 7, 11, 12, 20, 33, 40]


def a_target() -> Any:
    return networks.tiny("LlamaConfig", num_hidden_layers=6)


def a_model(**kwargs: Any) -> HuggingFaceModel:
    return HuggingFaceModel(a_target(), name="target", max_slots=2, max_len=64, **kwargs)


@pytest.mark.parametrize("field", ["max_position_embeddings", "n_positions", "max_seq_len", None])
def test_a_head_has_places_for_the_whole_context_of_the_target(field: str | None) -> None:
    class Network:
        config = PretrainedConfig(num_hidden_layers=2, **({field: 32768} if field else {}))

        def get_input_embeddings(self) -> torch.nn.Embedding:
            return torch.nn.Embedding(4, 2)

    assert head_weights.HeadWeights({}, Network()).context == (32768 if field else 8192)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Reference:
    """The published formula without a cache: rows see what is marked, at the positions that are given."""

    def __init__(self, folder: Path, network: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config = config.get("transformer_layer_config", config)
        found = load_file(folder / "model.safetensors")
        self.w = {n: t.float() for n, t in found.items()}
        for prefix in ("midlayer.", "layers.0.", "transformer.", "fusion_"):
            self.w = {n.removeprefix(prefix): t for n, t in self.w.items()}
        self.embedding, self.lm_head = network.get_input_embeddings().weight.float(), network.lm_head.weight.float()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if "hidden_norm.weight" not in self.w:
            return states
        if "input_norm.weight" in self.w:
            states = rms(states, self.w["input_norm.weight"])
        if "fc_norm.0.weight" in self.w:
            parts = states.chunk(3, -1)
            states = torch.cat([rms(p, self.w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], -1)
        return linear(states, self.w["fc.weight"])

    def rows(
        self, ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the draft vocabulary, and the features that rows pass on."""
        w, embedded = self.w, self.embedding[ids]
        if "hidden_norm.weight" in w:
            normed = rms(features, w["hidden_norm.weight"])
            residual = normed if self.config.get("norm_before_residual") else features
            read = torch.cat([rms(embedded, w["input_layernorm.weight"]), normed], -1)
        else:
            residual = read = linear(torch.cat([embedded, features], -1), w["fc.weight"], w.get("fc.bias"))
        x = residual + self._attention(read, positions, sees)
        inner = rms(x, w["post_attention_layernorm.weight"])
        gate, up = linear(inner, w["mlp.gate_proj.weight"]), linear(inner, w["mlp.up_proj.weight"])
        x = x + linear(silu(gate) * up, w["mlp.down_proj.weight"])
        out = rms(x, w["norm.weight"]) if "norm.weight" in w else x
        head = w.get("lm_head.weight", self.lm_head)
        if "d2t" in w and "lm_head.weight" not in w:
            head = self.lm_head[torch.arange(len(w["d2t"])) + w["d2t"].long()]
        return linear(out, head), out if self.config.get("norm_output") else x

    def _attention(self, x: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        w, num_q, num_kv = self.w, self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (linear(x, w[f"self_attn.{n}_proj.weight"]) for n in "qkv")
        dim = q.shape[-1] // num_q
        q, k, v = (t.view(len(x), -1, dim).transpose(0, 1) for t in (q, k, v))
        if "self_attn.q_norm.weight" in w:
            q, k = (rms(t, w[f"self_attn.{name}_norm.weight"]) for name, t in (("q", q), ("k", k)))
        nested = self.config.get("rope_parameters", {}).get("sliding_attention", {})
        theta = nested.get("rope_theta", self.config["rope_theta"])
        angle = positions[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

        def turned(t: torch.Tensor) -> torch.Tensor:
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat([-b, a], -1) * sin

        k, v = (t.repeat_interleave(num_q // num_kv, 0) for t in (turned(k), v))
        score = turned(q) @ k.transpose(1, 2) / dim**0.5
        if self.config.get("layer_types") == ["sliding_attention"]:
            sees = sees & (positions[:, None] - positions < self.config["sliding_window"])
        weight = score.masked_fill(~sees, -torch.inf).softmax(-1)
        return linear((weight @ v).transpose(0, 1).reshape(len(x), -1), w["self_attn.o_proj.weight"])


TEXT = [5, 9, 2, 31, 17, 8, 40]

BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_ids": DRAFT_IDS},
    "eagle3 whole vocabulary": {"draft_ids": None},
    "eagle3 output of the target": {"draft_ids": DRAFT_IDS, "with_output": False},
    "eagle3 unsorted vocabulary": {"draft_ids": [*DRAFT_IDS[4:], *DRAFT_IDS[:4]]},
    "eagle3 sliding window": {"draft_ids": DRAFT_IDS, "layer_types": ["sliding_attention"], "sliding_window": 3},
    "speculators": {"draft_ids": DRAFT_IDS, "prefix": "layers.0.", "norm_before_residual": True},
    "speculators norm before fc": {"draft_ids": DRAFT_IDS, "prefix": "layers.0.", "more_tensors": ("input_norm",)},
    "speculators qwen3": {"draft_ids": DRAFT_IDS, "prefix": "layers.0.", "head_dim": 16, "more_tensors": ("qk_norm",)},
    "positions by kinds of layers": {"draft_ids": DRAFT_IDS, "rope_parameters": BY_KIND},
    "positions of several axes": {
        "draft_ids": DRAFT_IDS,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    },
    "speculators eagle 3.1": {"draft_ids": DRAFT_IDS, "more_tensors": ("fc_norm",), "norm_output": True},
}


@pytest.mark.parametrize("kind", [*KINDS, "eagle1", "eagle1 without bias", "eagle1 of speculators"])
@pytest.mark.parametrize("llama", [True, False], ids=["own network", "transformers"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_head_computes_the_published_formula_on_text_and_down_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, llama: bool, kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(head_weights, "SERVED", ())
    model = a_model(fast=llama)
    assert (model.llama is not None) == llama
    network = a_target()
    if kind.startswith("eagle1"):
        folder = eagle1(tmp_path, network, bias="without" not in kind, speculators="speculators" in kind)
    else:
        folder = eagle3(tmp_path, network, **KINDS[kind])
    head, reference = load_head(str(folder), model.network), Reference(folder, network)
    drafts = HeadModel(head, model.info, name="head", max_slots=2)
    hidden = network(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[i][0] for i in head.states], -1)
    assert head.states == ((6,) if kind.startswith("eagle1") else (2, 3, 3))

    # the target exposes what the head reads
    model.expose(head.states)
    slot = model.open()
    model.forward([Rows.chain(slot, 0, TEXT)], num_logits=[1])
    torch.testing.assert_close(model.states, states, atol=1e-4, rtol=1e-4)
    features = drafts.fuse(model.states)
    torch.testing.assert_close(features, reference.fuse(states), atol=1e-4, rtol=1e-4)

    # text from the second token on, then a tree: two children of its end, and a child of the second one
    own = drafts.open()
    num = len(TEXT) - 1
    chain = Rows.chain(own, 1000, TEXT[1:], features[:-1].numpy())
    drafts.forward([chain], num_logits=[1])
    drafts.commit(own, 1000 + num - 1, keep_below=False)
    first = drafts.forward([Rows(own, np.array([1, 2]), np.array([COMMITTED, COMMITTED]), np.array([3, 12]))])
    second = drafts.forward([Rows(own, np.array([3]), np.array([2]), np.array([7]))])

    ids = torch.tensor([*TEXT[1:], 3, 12, 7])
    positions = torch.tensor([*range(num), num, num, num + 1])
    sees = torch.ones(num + 3, num + 3).tril().bool()
    sees[num + 1, num] = sees[num + 2, num] = False
    inputs = reference.fuse(states)[:-1]
    text, passed = reference.rows(ids[:num], inputs, positions[:num], sees[:num, :num])
    inputs = torch.cat([inputs, passed[-1:], passed[-1:]])
    some, passed = reference.rows(ids[:-1], inputs, positions[:-1], sees[:-1, :-1])
    inputs = torch.cat([inputs, passed[-1:]])
    every, _ = reference.rows(ids, inputs, positions, sees)
    d2t = reference.w.get("d2t")
    target_ids = torch.arange(every.shape[1]) if d2t is None else torch.arange(len(d2t)) + d2t.long()
    expected = torch.full((3, model.info.vocab_size), -torch.inf)
    expected[:, target_ids] = every[-3:]
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=2e-4, rtol=2e-4)
    del text, some


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_whatever_is_beside_them(tmp_path: Path, dtype: torch.dtype) -> None:
    network = a_target().to(dtype)
    model = HuggingFaceModel(network, name="target", max_slots=2, max_len=64)
    head = load_head(str(eagle3(tmp_path, network, draft_ids=DRAFT_IDS)), model.network)
    features = np.random.default_rng(0).standard_normal((len(TEXT), head.hidden_size)).astype(np.float32)
    drafts = HeadModel(head, model.info, name="head", max_slots=12)

    def chain() -> Rows:
        return Rows.chain(drafts.open(), 1, TEXT, features)

    def one_by_one() -> list[torch.Tensor]:
        slot = drafts.open()
        found = []
        for i, token in enumerate(TEXT):
            found.append(drafts.forward([Rows.chain(slot, 1 + i, [token], features[i : i + 1])]))
            drafts.commit(slot, 1 + i, keep_below=False)
        return found

    alone = drafts.forward([chain()])
    together = drafts.forward([chain() for _ in range(5)])
    assert torch.equal(torch.cat(one_by_one()), alone)
    assert torch.equal(together, alone.repeat(5, 1))


def test_atoms_of_a_reduced_vocabulary_are_those_of_its_logits_in_target_ids(tmp_path: Path) -> None:
    model = a_model()
    ids = [*range(0, 32, 2), *range(33, 48)]
    drafts = HeadModel(
        load_head(str(eagle3(tmp_path, model.network, draft_ids=ids)), model.network), model.info, name="h"
    )
    slot = drafts.open()
    rows = Rows.chain(slot, 1, [3, 4, 5], np.ones((3, drafts.head.hidden_size), np.float32))
    logits = drafts.forward([rows])
    drafts.release(slot)
    kind, reduction = atoms_of([Sampling(temperature=0.8, top_p=0.9)] * 3, 48, 5)
    expected = kind.read(reduction.of(logits, torch.from_numpy(reduction.table)).numpy())
    kind, reduction = atoms_of([Sampling(temperature=0.8, top_p=0.9)] * 3, 48, 5)
    found = kind.read(drafts.forward([rows], reduction=reduction).numpy())
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.weight, expected.weight)


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        load_head(str(folder), a_target())


def changed(folder: Path, **config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("shape", [(2, 32), (4, 32), (3, 16)])
def test_features_of_another_number_or_size_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    network = a_target()
    model = HuggingFaceModel(network, name="target", max_slots=2, max_len=64)
    head = load_head(str(eagle3(tmp_path, network, draft_ids=DRAFT_IDS)), model.network)
    drafts = HeadModel(head, model.info, name="head", max_slots=1)
    slot = drafts.open()
    assert drafts.feature_size == 32
    with pytest.raises(ValueError, match=r"features: shape"):
        drafts.forward([Rows.chain(slot, 0, [1, 2, 3], np.zeros(shape, np.float32))])
    drafts.forward([Rows.chain(slot, 0, [1, 2, 3], np.zeros((3, 32), np.float32))])


def test_inputs_for_layers_that_round_theirs_are_the_nearest_bfloat16() -> None:
    """As on processors with arithmetic in bfloat16, whichever this one is."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(5, 8, generator=generator).bfloat16()
    features, token_norm, feature_norm = (torch.randn(*shape, generator=generator) for shape in ((3, 8), (8,), (8,)))
    exact, residual = torch.empty(3, 16), torch.empty(3, 8)
    rounded = torch.empty(3, 16, dtype=torch.bfloat16)
    inputs = torch.tensor([4, 0, 2]).numpy(), *map(array_of, (embedding, features, token_norm, feature_norm))
    for read in (exact, rounded):
        head_inputs(*inputs, 1e-5, True, residual.numpy(), array_of(read))
    assert torch.equal(rounded, exact.bfloat16())
    assert torch.equal(residual, exact[:, 8:])
    expected = torch.nn.functional.rms_norm(embedding[[4, 0, 2]].float(), (8,), token_norm, 1e-5)
    torch.testing.assert_close(exact[:, :8], expected)


def test_layer_ids_of_angelslim_are_outputs(tmp_path: Path) -> None:
    network = a_target()
    folder = changed(eagle3(tmp_path, network, draft_ids=None), aux_hidden_states_layer_ids=[0, 2, 4])
    assert load_head(str(folder), network).states == (1, 3, 5)
    refused(
        changed(folder, aux_hidden_states_layer_ids=[0, 2, 5]),
        r"aux_hidden_states_layer_ids: \[0, 2, 5\]; the target has 6",
    )


def test_lossy_options_are_refused(tmp_path: Path) -> None:
    folder = eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS)
    for name, value in (("verifier_accept_k", 3), ("accept_tolerance", 0.1)):
        refused(changed(folder, speculators_config={"proposal_methods": [{name: value}]}), f"{name}.*lossy")


def test_token_ids_in_the_place_of_offsets_are_refused(tmp_path: Path) -> None:
    folder = eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS)
    weights = load_file(folder / "model.safetensors")
    weights["d2t"] = torch.tensor([*DRAFT_IDS[:-1], 47])
    save_file(weights, folder / "model.safetensors")
    refused(folder, "d2t.*offsets")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, "eagle_aux_hidden_state_layer_ids.*6 layers"),
        ({"speculators_model_type": "mlp"}, "speculators_model_type"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: False"),
        ({"layernorms": True}, "layernorms: True is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["linear_attention"]}, "layer_types: linear_attention"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window: None"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window: 0"),
    ],
)
def test_configurations_of_other_heads_are_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    refused(changed(eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS), **change), match)


@pytest.mark.parametrize("name", ["lm_head.weight", "fc.weight", "midlayer.self_attn.q_proj.weight"])
def test_tensors_of_another_target_are_refused(tmp_path: Path, name: str) -> None:
    folder = eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS)
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.zeros(5, 5)
    save_file(weights, folder / "model.safetensors")
    refused(folder, "head: ")


MISSHAPEN: dict[str, dict[str, torch.Tensor]] = {
    "norm.weight": {"norm.weight": torch.ones(3)},  # a kernel would read what lies behind it
    "norm.weight of two dimensions": {"norm.weight": torch.ones(32, 32)},
    "hidden_norm.weight": {"midlayer.hidden_norm.weight": torch.ones(64)},
    "input_layernorm.weight": {"midlayer.input_layernorm.weight": torch.ones(1)},
    "post_attention_layernorm.weight": {"midlayer.post_attention_layernorm.weight": torch.ones(1)},
    "input_norm.weight": {"input_norm.weight": torch.ones(32)},
    "fc_norm.0.weight": {f"fc_norm.{i}.weight": torch.ones(1) for i in range(3)},
    "fc_norm.1.weight": {"fc_norm.0.weight": torch.ones(32)},
    "lm_head.weight": {"lm_head.weight": torch.ones(8, 64)},
    "lm_head.weight of one dimension": {"lm_head.weight": torch.ones(8)},
    "d2t of two dimensions": {"d2t": torch.zeros(8, 1, dtype=torch.int64)},
    "d2t of none": {"d2t": torch.tensor(3)},
    "d2t without tokens": {"d2t": torch.zeros(0, dtype=torch.int64), "lm_head.weight": torch.zeros(0, 32)},
}


@pytest.mark.parametrize("which", MISSHAPEN)
def test_misshapen_tensors_are_refused_by_name(tmp_path: Path, which: str) -> None:
    folder = eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS)
    weights = load_file(folder / "model.safetensors") | MISSHAPEN[which]
    if which.startswith("d2t"):
        del weights["t2d"]
    save_file(weights, folder / "model.safetensors")
    refused(folder, which.partition(" ")[0])


def test_heads_of_attention_that_share_no_keys_evenly_are_refused(tmp_path: Path) -> None:
    """Four query heads over three of keys: a kernel would read keys of a fourth."""
    refused(eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS, num_key_value_heads=3), "num_key_value_heads: 3")


@pytest.mark.parametrize("make", [eagle1, partial(eagle3, draft_ids=None, with_output=False)])
def test_a_head_that_is_wider_than_what_it_takes_of_the_target_is_refused(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path, networks.tiny("LlamaConfig", num_hidden_layers=6, hidden_size=64))
    weights = load_file(folder / "model.safetensors") | {"embed_tokens.weight": torch.ones(96, 64)}
    if "fc.bias" not in weights:
        weights["fc.weight"] = torch.ones(64, 96)
    save_file(weights, folder / "model.safetensors")
    refused(folder, "hidden_size: 64")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"hidden_size": "wide"}',
        '{"num_attention_heads": 0}',
        '{"eagle_aux_hidden_state_layer_ids": ["a"]}',
        '{"eagle_config": [1]}',
        '{"speculators_config": [1]}',
        '{"rope_scaling": {"rope_type": "unheard"}}',
        '{"architectures": 3}',
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    folder = eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS)
    wrong = json.loads(text)
    if isinstance(wrong, dict):
        changed(folder, **wrong)
    else:
        (folder / "config.json").write_text(text)
    refused(folder, "head: ")


def test_a_head_whose_weights_are_no_numbers_is_refused(tmp_path: Path) -> None:
    model = a_model()
    folder = eagle3(tmp_path, model.network, draft_ids=DRAFT_IDS)
    weights = load_file(folder / "model.safetensors") | {"norm.weight": torch.full((32,), torch.nan)}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match="acceptance nan"):
        load_head_model(str(folder), model, max_slots=1)


def test_a_tensor_that_no_known_head_has_is_refused(tmp_path: Path) -> None:
    folder = eagle3(tmp_path, a_target(), draft_ids=DRAFT_IDS)
    weights = load_file(folder / "model.safetensors") | {"midlayer.adapter.weight": torch.zeros(2)}
    save_file(weights, folder / "model.safetensors")
    refused(folder, "adapter.weight")


def test_the_load_probe_needs_no_tokenizer_that_knows_its_text(tmp_path: Path) -> None:
    """A word-level tokenizer of a target for something else than English makes one unknown word of the text."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(networks.VOCAB)}, unk_token="w0"))
    model = a_model(tokenizer=PreTrainedTokenizerFast(tokenizer_object=words))
    assert len(model.tokenizer.encode("Some text.", add_special_tokens=False)) == 1
    folder = eagle3(tmp_path, model.network, draft_ids=None, scale=0.5)
    assert load_head_model(str(folder), model, max_slots=1).reads


def test_the_load_probe_reads_layer_ids_as_the_head_was_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that copies the target's last states: right with outputs of layers, wrong with inputs."""
    model = a_model()
    folder = eagle3(tmp_path, model.network, draft_ids=DRAFT_IDS, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    head = load_head(str(folder), model.network)
    accepted = {(1, 2, 3): 0.2, (2, 3, 4): 0.4}
    monkeypatch.setattr("rootward.engine.head_loading.acceptance", lambda head, *_: accepted[head.states])
    with caplog.at_level("INFO"):
        assert load_head_model(str(folder), model, max_slots=1).reads == (2, 3, 4)
    assert "0.40" in caplog.text
    accepted = dict.fromkeys(accepted, 0.01)
    with pytest.raises(ConfigurationError, match=r"0\.01.*other target"):
        load_head_model(str(folder), model, max_slots=1)
    assert head.states == (1, 2, 3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["eagle3", "without output", "eagle1"])
def test_a_head_apart_from_its_target_drafts_as_beside_it(kind: str, tied: bool, tmp_path: Path) -> None:
    """Of the target's folder it reads the embedding and the output matrix, and no layer."""
    network = networks.tiny("LlamaConfig", num_hidden_layers=6, tie_word_embeddings=tied)
    network.save_pretrained(tmp_path / "target")
    own = tmp_path / "head"
    if kind == "eagle1":
        eagle1(own, network)
    else:
        eagle3(own, network, draft_ids=DRAFT_IDS, with_output=kind == "eagle3")
    model = HuggingFaceModel(network, name="target", max_slots=1, max_len=64)
    beside = HeadModel(load_head(str(own), model.network), model.info, name="beside", max_slots=1)
    apart = load_head_apart(str(own), str(tmp_path / "target"), dtype="float32", max_slots=1, max_len=64)
    assert apart.info.vocab_size == model.info.vocab_size
    assert apart.info.max_positions == 64
    assert apart.info.fingerprint == fingerprint(str(own)) != fingerprint(str(tmp_path / "target"))
    features = np.random.default_rng(1).normal(size=(6, apart.feature_size)).astype(np.float32)
    rows = [model.forward([Rows.chain(model.open(), 0, [1, 2, 3, 4, 5, 6], features)]) for model in (beside, apart)]
    torch.testing.assert_close(*rows)


def test_a_target_without_the_tensors_of_a_head_is_refused(tmp_path: Path) -> None:
    network = a_target()
    eagle3(tmp_path / "head", network, draft_ids=DRAFT_IDS)
    network.save_pretrained(tmp_path / "target")
    for wrong, reason in ((tmp_path / "nowhere", "cannot be read"), (tmp_path / "target", "embed_tokens.weight in")):
        (tmp_path / "target" / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(ConfigurationError, match=reason):
            load_head_apart(str(tmp_path / "head"), str(wrong), max_slots=1)


def test_acceptance_of_the_load_probe_is_the_overlap_of_both_distributions(tmp_path: Path) -> None:
    model = a_model()
    network = a_target()
    folder = eagle3(tmp_path, network, draft_ids=DRAFT_IDS)
    head, reference = load_head(str(folder), model.network), Reference(folder, network)
    text = [*TEXT, *TEXT, *TEXT]
    out = network(torch.tensor([text]), output_hidden_states=True)
    features = reference.fuse(torch.cat([out.hidden_states[i][0] for i in head.states], -1))[:-1]
    num = len(text) - 1
    rows, _ = reference.rows(torch.tensor(text[1:]), features, torch.arange(num), torch.ones(num, num).tril().bool())
    draft, target = rows.softmax(-1), out.logits[0, 1:].softmax(-1)[:, DRAFT_IDS]
    expected = torch.minimum(draft, target).sum(-1).mean().item()
    assert acceptance(head, model, text) == pytest.approx(expected, abs=1e-4)
    model.check_idle()
    assert not model.llama.exposed
