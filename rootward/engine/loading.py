"""From a name to a model: `tabular:vocab=5,seed=1`, a Hugging Face folder or hub name, or a GGUF file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rootward.engine.gguf_files import local_model
from rootward.engine.tabular import TabularModel
from rootward.engine.tokenizers import find_tokenizer, is_path
from rootward.errors import ConfigurationError
from rootward.ports import LanguageModel

if TYPE_CHECKING:
    from rootward.engine.parallel import Group

log = logging.getLogger(__name__)

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
    `require_trees`: with exit code 3 if it cannot run token trees; otherwise it decodes plainly.
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
        spec = local_model(spec)
    require_folder(spec)
    from rootward.engine.checkpoint import read_network  # transformers takes seconds to import
    from rootward.engine.graphs import CudaCapture
    from rootward.engine.model import HuggingFaceModel

    _check_device(device, cuda_graphs)
    model = HuggingFaceModel(
        read_network(spec, device=device, dtype=dtype, quantization=quantization, adapter=adapter, group=group),
        name=spec,
        tokenizer=find_tokenizer(spec),
        max_slots=max_slots,
        max_len=max_len,
        kv_cache_tokens=kv_cache_tokens,
        group=group,
        adapter=adapter,
        capture=CudaCapture(device) if cuda_graphs else None,
    )
    if group is None or group.leads:
        log.info("%s: %s", spec, model.memory)
        how = ", steps are recorded" if cuda_graphs else ", in few operations" if model.llama else ""
        log.info("%s: attention %s%s", spec, model.probe_report.attention or "none", how)
        log.info("%s: losslessness at temperature 0: %s", spec, model.info.lossless.value)
    if not model.info.supports_trees:
        message = f"model: {spec!r} cannot run token trees: {model.probe_report.reason}"
        if require_trees:
            raise ConfigurationError(f"{message}; use another model, or serve it without speculation", exit_code=3)
        log.warning("%s; it decodes plainly, without a KV cache", message)
    return model


def _check_device(device: str, cuda_graphs: bool) -> None:
    try:
        cuda = torch.device(device).type == "cuda"
    except RuntimeError:
        raise ConfigurationError(f"device: {device!r} is no torch device; use cpu or cuda") from None
    if cuda_graphs and not cuda:
        raise ConfigurationError(f"cuda_graphs: device {device!r} has none; leave it out")
    if cuda and not torch.cuda.is_available():
        raise ConfigurationError(f"device: {device!r}, but torch {torch.__version__} finds no CUDA device; use cpu")


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
