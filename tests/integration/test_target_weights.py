"""Targets that are more than a folder of weights: with a LoRA adapter, quantised while they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import services
from unit.engine.networks import tiny

from rootward.core.requests import DraftMode, SpeculationMode
from rootward.engine.loading import load_model
from rootward.engine.model import HuggingFaceModel
from rootward.errors import ConfigurationError
from rootward.ports import Rows

RANK, ALPHA = 3, 6
QUANTO = json.dumps({"quant_method": "quanto", "weights": "int8"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tiny("LlamaConfig").save_pretrained(path)
    return path


def write_adapter(path: Path, seed: int) -> Path:
    """As peft writes it, by hand: what is expected must not come from the library that is tested."""
    rng = torch.Generator().manual_seed(seed)
    path.mkdir(exist_ok=True)
    tensors = {}
    for layer in range(2):
        for name, rows, columns in (("self_attn.q_proj", 32, 32), ("mlp.down_proj", 32, 48)):
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=rng)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=rng)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]}
    path.joinpath("adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    return write_adapter(tmp_path_factory.mktemp("adapter"), 1)


def load(folder: Path, **options: object) -> HuggingFaceModel:
    model = load_model(str(folder), max_slots=4, max_len=128, **options)
    assert isinstance(model, HuggingFaceModel)
    return model


def logits(model: HuggingFaceModel) -> torch.Tensor:
    slot = model.open()
    found = model.forward([Rows.chain(slot, 0, list(range(2, 30)))])
    model.close(slot)
    return found


def test_an_adapter_is_added_to_the_target(folder: Path, adapter: Path) -> None:
    merged = tiny("LlamaConfig")
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        if name.endswith("lora_A.weight"):
            stem = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            other = load_file(adapter / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
            with torch.no_grad():
                merged.get_submodule(stem).weight += ALPHA / RANK * other @ tensor
    expected = logits(HuggingFaceModel(merged, name="merged", max_slots=4, max_len=128))
    found = logits(load(folder, adapter=str(adapter)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - logits(load(folder))).abs().max() > 0.1


def test_what_is_cached_under_one_adapter_is_not_found_under_another(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    other = write_adapter(tmp_path / "other", 2)
    same = write_adapter(tmp_path / "same", 1)
    base, first, second, again = (
        load(folder, adapter=a).info.fingerprint for a in (None, str(adapter), str(other), str(same))
    )
    assert len({base, first, second}) == 3
    assert again == first


@pytest.mark.parametrize(("temperature", "law"), [(0.0, DraftMode.SAMPLED), (1.0, DraftMode.COUPLED)])
@pytest.mark.parametrize("kind", ["adapter", "quantised"])
async def test_text_is_that_of_plain_decoding(
    folder: Path, request: pytest.FixtureRequest, kind: str, temperature: float, law: DraftMode
) -> None:
    """The draft is the model without adapter and in full precision, so it is often wrong."""
    if kind == "adapter":
        target = load(folder, adapter=str(request.getfixturevalue("adapter")))
    else:
        pytest.importorskip("optimum.quanto")
        target = load(folder, quantization=QUANTO)
    draft = load(folder)
    texts = []
    async with services.in_process(target, draft, num_draft_tokens=6) as system:
        for mode in (SpeculationMode.DISABLED, SpeculationMode.REQUIRED):
            wanted = services.request(mode.value, (5, 9, 2, 44), temperature=temperature, law=law, mode=mode, seed=3)
            texts.append((await services.collect(system.verifier, wanted))[0])
    assert texts[0] == texts[1]
    assert len(texts[0]) >= 20


def test_quantised_weights_take_less_and_are_another_model(folder: Path) -> None:
    pytest.importorskip("optimum.quanto")
    plain, small = load(folder), load(folder, quantization=QUANTO)
    assert small.memory.weights < 0.6 * plain.memory.weights
    assert small.info.fingerprint != plain.info.fingerprint
    assert small.info.supports_trees
    assert 0 < (logits(small) - logits(plain)).abs().max() < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": "/nowhere"}, "target_adapter: '/nowhere' holds no adapter_config.json"),
        ({"quantization": "int8"}, "quantization: 'int8' is not valid"),
        ({"quantization": '{"quant_method": "none such"}'}, "quantization: .* is not valid"),
    ],
)
def test_what_cannot_be_read_is_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(folder, **options)


def test_adapters_that_do_not_fit_are_refused(folder: Path, adapter: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", 1)
    config = json.loads(other.joinpath("adapter_config.json").read_text())
    for changes, message in (
        ({"target_modules": ["none_such"]}, "does not fit the model"),
        ({"peft_type": "PREFIX_TUNING"}, "only LoRA is served"),
        ({"r": RANK + 1}, "does not fit the model"),
    ):
        other.joinpath("adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ConfigurationError, match=message):
            load(folder, adapter=str(other))
    with pytest.raises(ConfigurationError, match="has no weights"):
        load_model("tabular:vocab=5", adapter=str(adapter))


@pytest.mark.parametrize("change", ["missing", "renamed", "beyond the layers", "beside the modules", "cut"])
def test_an_adapter_of_which_a_part_would_be_left_out_is_refused(
    folder: Path, adapter: Path, tmp_path: Path, change: str
) -> None:
    """peft leaves out what does not match, with a warning at most: the text would be that of another model."""
    file = write_adapter(tmp_path / "other", 1) / "adapter_model.safetensors"
    tensors = load_file(file)
    stem = "base_model.model.model.layers.1.self_attn.q_proj"
    own = {part: tensors[f"{stem}.{part}.weight"] for part in ("lora_A", "lora_B")}
    if change in ("missing", "renamed"):
        for part in own:
            del tensors[f"{stem}.{part}.weight"]
    other = {"renamed": "layers.1.attn.q_proj", "beyond the layers": "layers.2.self_attn.q_proj"}
    other |= {"beside the modules": "layers.1.self_attn.o_proj"}
    if change in other:
        tensors |= {f"base_model.model.model.{other[change]}.{part}.weight": own[part].clone() for part in own}
    save_file(tensors, file)
    if change == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match=r"target_adapter: .* does not fit the model"):
        load(folder, adapter=str(file.parent))
