"""From a name to a model: `tabular:vocab=5,seed=1`, a Hugging Face folder or hub name, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rootward.engine.tabular import TabularModel
from rootward.engine.tokenizers import is_path
from rootward.errors import ConfigurationError
from rootward.ports import LanguageModel

if TYPE_CHECKING:
    from rootward.engine.parallel import Group

TABULAR = "tabular:"
TABULAR_KEYS: dict[str, type] = {
    "vocab": int,
    "seed": int,
    "order": int,
    "sharpness": float,
    "zeros": float,
    "eos": int,
    "noise": float,
    "noise_seed": int,
    "step_ms": float,
    "max_positions": int,
}


def load_model(
    spec: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    max_slots: int = 8,
    max_len: int | None = None,
    kv_cache_tokens: int | None = None,
    require_trees: bool = False,
    group: Group | None = None,
    adapter: str | None = None,
    quantization: str | None = None,
    cuda_graphs: bool = False,
) -> LanguageModel:
    """The model that a setting names. ConfigurationError, one line, if there is none or it cannot be served.

    `max_len` is the longest context in tokens (default: the model's own, at most 8192 for a Hugging Face model);
    `kv_cache_tokens` bounds the KV memory of all sessions together (default: `max_slots` of the longest).
    `group`: the ranks that share the model; each of them calls this. `adapter`, `quantization`: see `checkpoint.read_network`.
    """
    if spec.startswith(TABULAR):
        for name, given in (("tensor_parallel", group), ("target_adapter", adapter), ("quantization", quantization)):
            if given is not None:
                raise ConfigurationError(f"{name}: {spec!r} has no weights; leave it out")
        if cuda_graphs:
            raise ConfigurationError(f"cuda_graphs: {spec!r} runs on no device; leave it out")
        return _tabular(spec, max_slots, max_len, kv_cache_tokens)
    if spec.endswith(".gguf"):
        from rootward.engine.checkpoint import local_model

        spec = local_model(spec)
    require_folder(spec)
    from rootward.engine.model import HuggingFaceModel  # transformers takes seconds to import

    return HuggingFaceModel.load(
        spec,
        device=device,
        dtype=dtype,
        max_slots=max_slots,
        max_len=max_len,
        kv_cache_tokens=kv_cache_tokens,
        require_trees=require_trees,
        group=group,
        adapter=adapter,
        quantization=quantization,
        cuda_graphs=cuda_graphs,
    )


def require_folder(spec: str) -> None:
    """ConfigurationError for a path that is not a model folder. Other names may be on the hub."""
    folder = Path(spec).expanduser()
    if not spec.strip() or (is_path(spec) and not folder.is_dir()):
        raise ConfigurationError(f"model: no folder at {spec!r}; give a folder with config.json, or a hub name")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigurationError(f"model: {spec!r} holds no config.json; give a folder written by save_pretrained")


def _tabular(spec: str, max_slots: int, max_len: int | None, kv_cache_tokens: int | None) -> TabularModel:
    values: dict[str, Any] = {}
    for item in filter(None, spec.removeprefix(TABULAR).split(",")):
        key, _, text = item.partition("=")
        if key not in TABULAR_KEYS:
            raise ConfigurationError(f"model: {spec!r} has no setting {key!r}; use {', '.join(TABULAR_KEYS)}")
        try:
            values[key] = TABULAR_KEYS[key](text)
        except ValueError:
            raise ConfigurationError(f"model: {key}={text!r} in {spec!r} is not a number") from None
    if "vocab" not in values:
        raise ConfigurationError(f"model: {spec!r} gives no vocabulary; write for example tabular:vocab=5,seed=1")
    if max_len is not None:
        values["max_positions"] = min(values.get("max_positions", max_len), max_len)
    try:
        return TabularModel(max_slots=max_slots, kv_cache_tokens=kv_cache_tokens, **values)
    except ValueError as wrong:
        raise ConfigurationError(f"model: {spec!r}: {wrong}") from wrong
