"""From a name to a model, and tokenizers compared by content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from transformers import GPT2Config, LlamaConfig, PreTrainedTokenizerFast
from unit.engine import networks

from rootward.core.requests import Sampling
from rootward.core.tree import root_only
from rootward.demo import paths
from rootward.engine import gguf_files
from rootward.engine.checkpoint import cpu_dtype, fingerprint
from rootward.engine.loading import load_model
from rootward.engine.processors import Prefix, adjusted
from rootward.engine.tabular import TabularModel
from rootward.engine.tokenizers import content_hash, find_tokenizer, first_difference, load_tokenizer, num_ids
from rootward.errors import ConfigurationError


def words(*texts: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    raw = Tokenizer(WordLevel({t: i for i, t in enumerate(texts)}, unk_token=texts[0]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def test_a_table_from_its_name() -> None:
    model = load_model("tabular:vocab=5,seed=1,order=2,noise=0.5,eos=3,max_positions=50", max_slots=3, max_len=64)
    assert load_model("tabular:vocab=5", max_len=64).info.max_positions == 64
    assert isinstance(model, TabularModel)
    assert (model.info.vocab_size, model.info.eos_ids, model.info.max_positions) == (5, (3,), 50)
    assert model.num_free_slots == 3
    again = TabularModel(5, 1, 2, noise=0.5, eos=3)
    assert model.law([1, 2]).tolist() == again.law([1, 2]).tolist()


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("tabular:", "vocab=5"),
        ("tabular:vocab=five", "vocab='five'"),
        ("tabular:vocab=5,color=1", "'color'"),
        ("tabular:vocab=5,eos=9", "eos"),
        ("/nowhere/at/all", "/nowhere/at/all"),
        ("./nothing", "./nothing"),
        ("", "hub name"),
    ],
)
def test_a_wrong_name_is_one_line(spec: str, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_model(spec)
    assert caught.value.exit_code == 2
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no config") as caught:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_tokenizers_are_compared_by_content(tmp_path: Path) -> None:
    files = {
        "a": words("un", "a", "b", "c"),
        "same": words("un", "a", "b", "c"),
        "other": words("un", "a", "x", "c"),
        "longer": words("un", "a", "b", "c", special=("<end>",)),
    }
    for name, tokenizer in files.items():
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"model_type": "llama", "vocab_size": 64}')

    def compare(a: str, b: str) -> object:
        return first_difference(*(load_tokenizer(str(tmp_path / name)) for name in (a, b)))

    assert compare("a", "same") is None
    assert compare("a", "other") == (2, "b", "x")
    assert compare("a", "longer") == (4, None, "<end>")
    assert content_hash(files["a"]) == content_hash(files["same"])
    assert len({content_hash(files[name]) for name in ("a", "other", "longer")}) == 3
    assert (num_ids(files["a"]), num_ids(files["longer"])) == (4, 5)
    with pytest.raises(ConfigurationError, match="nowhere"):
        compare("a", "../nowhere/x")


def test_the_hash_sees_merges() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "c": 3, "bc": 4}
    one, two = (
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab, merges)))
        for merges in ([("a", "b"), ("b", "c")], [("b", "c"), ("a", "b")])
    )
    assert one.get_vocab() == two.get_vocab()
    assert content_hash(one) != content_hash(two)


@pytest.mark.parametrize(("amx", "avx512"), [(True, True), (False, True), (False, False)])
def test_auto_is_bfloat16_where_the_checkpoint_has_it_and_the_processor_or_our_own_layers(
    amx: bool, avx512: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    for stored in ("float32", "bfloat16", "float16"):
        LlamaConfig(dtype=stored).save_pretrained(tmp_path)
        dtype, why = cpu_dtype(str(tmp_path))
        is_fast = amx or avx512 or stored == "bfloat16"  # Llama's own layers read bfloat16 on any processor
        assert dtype == ("bfloat16" if stored != "float32" and is_fast else "float32")
        assert why
    GPT2Config(dtype="bfloat16").save_pretrained(tmp_path)
    assert cpu_dtype(str(tmp_path))[0] == ("bfloat16" if amx or avx512 else "float32")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        cpu_dtype(str(tmp_path / "nothing"))


def test_a_checkpoint_whose_logits_are_no_numbers_is_refused(tmp_path: Path) -> None:
    """Otherwise it starts, and every request fails."""
    network = networks.tiny("LlamaConfig")
    network.model.norm.weight.data[3] = torch.nan
    network.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="its logits are NaN"):
        load_model(str(tmp_path), max_slots=1, max_len=64)


def test_a_damaged_tokenizer_is_not_taken_for_none(tmp_path: Path) -> None:
    """Without it ids that are padding of the vocabulary would be sampled."""
    assert find_tokenizer(str(tmp_path)) is None
    words("un", "a", "b").save_pretrained(tmp_path)
    assert num_ids(find_tokenizer(str(tmp_path))) == 3
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigurationError, match="tokenizer"):
        find_tokenizer(str(tmp_path))


def test_an_end_of_text_that_is_no_token_is_none(tmp_path: Path) -> None:
    """To hold it back until `min_tokens` would fail the step of every session."""
    network = networks.tiny("LlamaConfig")
    network.generation_config.eos_token_id = network.config.eos_token_id = [1, 9999, -1]
    network.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), max_slots=1, max_len=64)
    assert model.info.eos_ids == (1,)
    prefix = Prefix(num_before_stop=2, stop_ids=model.info.eos_ids)
    logits = torch.zeros(1, model.info.vocab_size)
    scores = adjusted(logits, [(Sampling(), prefix, root_only())])
    assert scores[0].isneginf().nonzero().flatten().tolist() == [1]


def test_fingerprints_differ_by_weights_in_buffers() -> None:
    """Where quantised layers have them. What a network computes at start is no weight."""
    network = networks.tiny("LlamaConfig", num_hidden_layers=1)
    plain = fingerprint(network)
    network.lm_head.register_buffer("computed", torch.ones(3), persistent=False)
    assert fingerprint(network) == plain
    network.lm_head.register_buffer("qweight", torch.tensor([1, 2, 3]))
    one = fingerprint(network)
    network.lm_head.qweight[1] = 4
    assert len({plain, one, fingerprint(network)}) == 3


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def convert(file: Path, folder: Path) -> None:
        converted.append(file)
        (folder / "config.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(gguf_files, "_convert", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")
    folder = gguf_files.local_model(str(file))
    assert gguf_files.local_model(str(file)) == folder
    assert converted == [file.resolve()]
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]
    file.write_bytes(b"GGUF, changed")
    assert gguf_files.local_model(str(file)) != folder
    assert gguf_files.local_model("owner/name") == "owner/name"
    with pytest.raises(ConfigurationError, match="no file at"):
        gguf_files.local_model(str(tmp_path / "other.gguf"))


def test_a_gguf_file_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"no such format")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_model(str(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache" / "rootward" / "gguf").iterdir())


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def with_settings(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def with_an_empty_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight.*missing"),
        (without("lm_head.weight"), "lm_head.weight.*missing"),
        (with_settings(num_hidden_layers=3), "layers.2.*missing"),
        (with_settings(intermediate_size=64), r"layers.0.mlp.down_proj.weight.*\[32, 48\].*\[32, 64\]"),
        (with_settings(hidden_size="wide"), "cannot be read.*hidden_size"),
        (with_settings(rope_parameters={"rope_type": "unheard"}), "cannot be read.*unheard"),
        (cut, "cannot be read.*SafetensorError"),
        (with_an_empty_index, "cannot be read.*weight_map"),
    ],
)
def test_a_checkpoint_that_is_damaged_or_lacks_tensors_is_refused(
    change: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    """Otherwise transformers fills what is missing with random numbers, and these are served."""
    networks.tiny("LlamaConfig").save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigurationError, match=named) as caught:
        load_model(str(tmp_path), max_slots=1, max_len=64)
    assert "\n" not in str(caught.value)


def test_a_device_that_torch_does_not_know_is_named() -> None:
    with pytest.raises(ConfigurationError, match="device: 'bogus' is no torch device; use cpu or cuda"):
        load_model(str(paths().target), device="bogus")
