"""GGUF files: each is converted once to a model folder. Torch is imported only for that, so that processes without a model stay small."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rootward.errors import ConfigurationError
from rootward.host import user_cache

log = logging.getLogger(__name__)

CONVERSION = 2  # version of `_convert`: folders of an older one are not used


def local_model(spec: str) -> str:
    """The folder or hub name to read: a GGUF file is converted once, into the user's cache directory.

    Its weights become bfloat16, or float32 if the file has no others. ConfigurationError if that cannot be done.
    """
    if not spec.endswith(".gguf"):
        return spec
    file = Path(spec).expanduser().resolve()
    if not file.is_file():
        raise ConfigurationError(
            f"model: no file at {spec!r}; give a GGUF file, a folder with config.json, or a hub name"
        )
    if find_spec("gguf") is None:
        raise ConfigurationError("model: GGUF files need one more package; run pip install 'rootward[worker]'")
    facts = file.stat()
    key = hashlib.sha256(f"{CONVERSION}:{file}:{facts.st_size}:{facts.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = user_cache() / "gguf"
    folder = cache / f"{file.stem}-{key}"
    if not (folder / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            own = Path(scratch) / "model"
            own.mkdir(mode=0o700)
            _convert(file, own)
            try:
                own.rename(folder)
            except OSError:
                if not (folder / "config.json").is_file():  # otherwise another process has written it
                    raise
    return str(folder)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from gguf import GGMLQuantizationType, GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from rootward.engine.checkpoint import check_complete, reading

    log.info("%s: reading; this takes a while, once", file.name)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns of the cost of networks that stay quantised
    try:
        with reading(str(file)):
            reader = GGUFReader(file)
            kinds = {tensor.tensor_type for tensor in reader.tensors}
            dtype = torch.float32 if kinds == {GGMLQuantizationType.F32} else torch.bfloat16
            network, found = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, dtype=dtype, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    finally:
        transformers_logging.set_verbosity(verbosity)
    check_complete(str(file), found)
    _check_read(file.name, reader, network)
    # Saved as an unquantised network: otherwise it would be run by the modules of GGUF files.
    config = network.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    result = plain.load_state_dict(network.state_dict(), strict=False)
    plain.tie_weights()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if wrong_names := (set(result.missing_keys) - tied) | set(result.unexpected_keys):
        raise ConfigurationError(
            f"model: {file.name} is read by transformers as other weights than its architecture has "
            f"({', '.join(sorted(wrong_names)[:3])}); convert it to a folder of safetensors"
        )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    log.info("%s: %s weights in %s", file.name, str(dtype).removeprefix("torch."), folder)


def _check_read(name: str, reader: Any, network: Any) -> None:
    """ConfigurationError if the file says more than transformers has read, which leaves out what it does not know without a word."""
    fix = "convert the model to a folder of safetensors, or serve it from the hub"
    if (count := _value(reader, "split.count")) and int(count) > 1:
        raise ConfigurationError(f"model: {name} is one of {count} parts; join them by llama-gguf-split --merge")
    scaling = _value(reader, f"{_value(reader, 'general.architecture')}.rope.scaling.type")
    read = getattr(network.config, "rope_parameters", None) or {}
    if scaling not in (None, "none") and read.get("rope_type", "default") == "default":
        raise ConfigurationError(
            f"model: {name} scales positions by {scaling!r}, which transformers does not read; {fix}"
        )
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    known = sum(weight.numel() for weight in network.parameters())
    if stored > known:
        some = ", ".join(tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")) or "tensors"
        raise ConfigurationError(
            f"model: {name}: transformers does not read {some} ({stored - known} of {stored} weights); {fix}"
        )


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
