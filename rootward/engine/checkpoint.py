"""Reading networks: from a folder, a hub name or a GGUF file; whole or this rank's part, quantised or not, with or without an adapter; and
their fingerprints."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rootward.engine.parallel import Group, check_shape, whole
from rootward.errors import ConfigurationError, first_line

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16", "auto")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def read_network(
    path_or_name: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    quantization: str | None = None,
    adapter: str | None = None,
    group: Group | None = None,
) -> Any:
    """A network of transformers on its device. ConfigurationError, one line, if that cannot be done.

    dtype         "auto": that of the checkpoint; on a CPU see `cpu_dtype`
    quantization  JSON of a `quantization_config` of transformers, {"quant_method": …}; None: what the checkpoint says
    adapter       folder with a LoRA adapter, which is merged into the weights
    group         the ranks that share the network; all of them call this
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    options: dict[str, Any] = {"dtype": _chosen_dtype(path_or_name, device, dtype, quantization)}
    if quantization is not None:
        options |= _quantised(quantization, device)
    if group is not None:
        options |= _shared(path_or_name, group)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # it would fill a log
    with reading(path_or_name):
        network, found = AutoModelForCausalLM.from_pretrained(
            path_or_name, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    check_complete(path_or_name, found)
    if group is None and "device_map" not in options:
        network = network.to(device)
    return network if adapter is None else _merged(network, adapter, group)


def check_complete(path_or_name: str, found: dict[str, Any]) -> None:
    """ConfigurationError if the network has weights that are not those of the checkpoint: transformers draws them at random.

    found: its report of the reading."""
    fix = "the checkpoint is damaged, or its config.json is that of another one"
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        shapes = f"has shape {list(stored)}, config.json makes it {list(wanted)}"
        raise ConfigurationError(f"model: {path_or_name!r}: tensor {name} {shapes}; {fix}")
    if missing := sorted(found["missing_keys"]):
        names = f"tensors {', '.join(missing[:3])} are missing ({len(missing)} in all)"
        raise ConfigurationError(f"model: {path_or_name!r}: {names}; {fix}")


def read_ends(path_or_name: str, *, device: str = "cpu", dtype: str = "auto") -> Any:
    """A network of which the embedding and the output matrix are read; its other parameters have no storage.

    ConfigurationError, one line, if that cannot be done: names of tensors that transformers renames, or files of another format."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = _chosen_dtype(path_or_name, device, dtype)
    with reading(path_or_name), torch.device("meta"):
        config = AutoConfig.from_pretrained(path_or_name)
        network = AutoModelForCausalLM.from_config(config)
    kept = {"auto": config.get_text_config().dtype or torch.float32}.get(dtype) or getattr(torch, dtype)
    names = {module: name for name, module in network.named_modules()}

    def weight_of(module: torch.nn.Module) -> torch.nn.Parameter:
        return torch.nn.Parameter(_tensor(path_or_name, f"{names[module]}.weight", device, kept), False)

    embedding, output = network.get_input_embeddings(), network.get_output_embeddings()
    embedding.weight = weight_of(embedding)
    output.weight = embedding.weight if config.get_text_config().tie_word_embeddings else weight_of(output)
    return network


def _tensor(path_or_name: str, name: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    """One tensor of a checkpoint of safetensors."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    def file_of(file: str) -> str | None:
        found: str | None = cached_file(path_or_name, file, _raise_exceptions_for_missing_entries=False)
        return found

    index = file_of("model.safetensors.index.json")
    with reading(path_or_name):
        shard = json.loads(Path(index).read_text())["weight_map"].get(name, "") if index else "model.safetensors"
    if (file := file_of(shard) if shard else None) is not None:
        with reading(path_or_name), safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  # it is no dict
                tensor: torch.Tensor = tensors.get_tensor(name).to(device, dtype)
                return tensor
    raise ConfigurationError(
        f"target: {path_or_name!r} has no tensor {name} in safetensors; give a folder that save_pretrained has written"
    )


def _chosen_dtype(path_or_name: str, device: str, dtype: str, quantization: str | None = None) -> str:
    """The name of a type of torch, or "auto": that of the checkpoint."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype: {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if dtype == "auto" and torch.device(device).type == "cpu" and quantization is None:
        dtype, why = cpu_dtype(path_or_name)
        log.info("%s: %s (dtype auto: %s)", path_or_name, dtype, why)
    return dtype


def cpu_dtype(path_or_name: str) -> tuple[str, str]:
    """(the type that "auto" means on this processor, the reason). It depends on the checkpoint and the instruction set, not on a
    measurement, because replicas on equal machines must choose the same."""
    from transformers import AutoConfig

    from rootward.engine.layers import KINDS

    with reading(path_or_name):
        config = AutoConfig.from_pretrained(path_or_name)
    if getattr(config, "quantization_config", None) is not None:
        return "auto", "the checkpoint is quantised"
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if stored not in (torch.bfloat16, torch.float16):
        return "float32", f"the checkpoint is {str(stored or torch.float32).removeprefix('torch.')}"
    fast = {"AMX": "_is_amx_tile_supported", "AVX-512 bfloat16": "_is_avx512_bf16_supported"}
    for name, supported in fast.items():
        if getattr(torch.cpu, supported, lambda: False)():
            return "bfloat16", f"the processor has {name}"
    if stored == torch.bfloat16 and config.model_type in KINDS:
        return "bfloat16", "half the memory to read a step; weights become float32 in registers"
    return "float32", "the processor has no bfloat16 arithmetic"


def fingerprint(network: Any, adapter: str | None = None) -> str:
    """sha256 over the configuration, over name, shape, type and 64 values of every weight, in buffers too, where quantised layers have
    them, and over the adapter's files.

    The same in every process, with or without tensor parallelism.
    """
    config = network.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "_attn_implementation", "distributed_config"):
        config.pop(volatile, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    buffers = dict(network.named_buffers())
    stored_buffers = {
        name: buffers[name] for name in network.state_dict().keys() & buffers.keys()
    }  # without those computed at start
    for name, weight in sorted([*network.named_parameters(), *stored_buffers.items()]):
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        for stored in leaves(whole(weight.detach())):
            flat = stored.reshape(-1)
            digest.update(flat[:: max(1, len(flat) // 64)][:64].double().cpu().numpy().tobytes())
    if adapter is not None:
        files = b"".join((Path(adapter).expanduser() / name).read_bytes() for name in ADAPTER_FILES)
        digest.update(hashlib.sha256(files).hexdigest().encode())
    return digest.hexdigest()


def num_bytes(network: Any) -> int:
    """Bytes of weights and buffers in the memory of this process."""
    return sum(stored.nbytes for w in (*network.parameters(), *network.buffers()) for stored in leaves(w))


def leaves(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a weight: itself, or the parts of a quantised or sharded one."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
        if isinstance(stored := getattr(weight, name), torch.Tensor):  # a sharded one has a process group too
            yield from leaves(stored)


def _shared(path_or_name: str, group: Group) -> dict[str, Any]:
    """Options with which transformers reads this rank's part only."""
    from transformers import AutoConfig

    if find_spec("accelerate") is None:
        raise ConfigurationError("tensor_parallel: needs more packages; run pip install 'rootward[tensor-parallel]'")
    with reading(path_or_name):
        from transformers.distributed import DistributedConfig

        config = AutoConfig.from_pretrained(path_or_name)
    check_shape(config.get_text_config(), group.size)
    return {"distributed_config": DistributedConfig(tp_size=group.size)}


def _quantised(quantization: str, device: str) -> dict[str, Any]:
    """Options with which transformers quantises while it reads."""
    from transformers.quantizers import AutoQuantizationConfig

    try:
        config = AutoQuantizationConfig.from_dict(json.loads(quantization))
    except Exception as wrong:  # quantisation methods raise many types
        raise ConfigurationError(f"quantization: {quantization!r} is not valid ({first_line(wrong)})") from wrong
    placed = {} if torch.device(device).type == "cpu" else {"device_map": {"": device}}
    return {"quantization_config": config, **placed}


def _merged(network: Any, adapter: str, group: Group | None) -> Any:
    """The network with the adapter's low-rank products added to its weights."""
    folder = Path(adapter).expanduser()
    missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigurationError(f"target_adapter: {adapter!r} holds no {missing[0]}; give a folder written by peft")
    if group is not None or getattr(network, "is_quantized", False):
        raise ConfigurationError(
            "target_adapter: cannot be merged into weights that are quantised or shared between ranks; merge it into the model first"
        )
    if find_spec("peft") is None:
        raise ConfigurationError("target_adapter: needs more packages; run pip install 'rootward[lora]'")
    from peft import PeftConfig, PeftModel

    try:
        kind = str(getattr(PeftConfig.from_pretrained(str(folder)).peft_type, "value", ""))
        if kind != "LORA":
            raise ConfigurationError(f"target_adapter: {adapter!r} is of kind {kind or 'unknown'}; only LoRA is served")
        adapted = PeftModel.from_pretrained(network, str(folder))
        # The first reading leaves out what does not match; the second one reports it.
        report = adapted.load_adapter(str(folder), "default")
        if odd := [*report.missing_keys, *report.unexpected_keys]:
            raise ValueError(f"{len(odd)} tensors are in one of the two alone: {', '.join(odd[:2])}")
        return adapted.merge_and_unload(safe_merge=True)
    except ConfigurationError:
        raise
    except Exception as wrong:  # damaged files raise many types
        raise ConfigurationError(f"target_adapter: {adapter!r} does not fit the model ({first_line(wrong)})") from wrong


@contextmanager
def reading(path_or_name: str) -> Iterator[None]:
    """ConfigurationError for every error of a reader: damaged files raise many types."""
    try:
        yield
    except Exception as wrong:
        # Other types than these two say little without their name: a missing key is its name alone.
        kind = "" if isinstance(wrong, (OSError, ValueError)) else f"{type(wrong).__name__}: "
        why = " ".join(f"{kind}{wrong}".split())[:400] or type(wrong).__name__
        raise ConfigurationError(f"model: {path_or_name!r} cannot be read ({why}); check the path or name") from wrong
