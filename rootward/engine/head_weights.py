"""Files of draft heads: config.json, tensors by name, and what computes with them. A matrix that a file lacks is the target's.

Where the kernels of `cpu_kernels` serve, linear layers are theirs, as the target's are; elsewhere those of torch.

Legend: N rows, T wanted rows, E hidden size of the head, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from rootward.engine.atoms import reduced, reduced_part
from rootward.engine.attention import FULL, SLIDING
from rootward.engine.cpu_kernels import SERVED
from rootward.engine.layers import Linear, Norm, Rotations
from rootward.engine.model import DEFAULT_MAX_LEN, context_of
from rootward.errors import ConfigurationError
from rootward.ports import Reduction


def product(linear: Any, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32[..., out] of float32[..., in] by a linear layer whose weight has this type."""
    if isinstance(linear, Linear):
        return linear.product(linear.array_of(rows)).view(*rows.shape[:-1], linear.out_features)
    out: torch.Tensor = linear(rows.to(dtype))
    return out.float()


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The output matrix of a head. ids int64[V']: the draft vocabulary in ids of the target, ascending; None: all of them."""

    matrix: Any
    ids: torch.Tensor | None
    vocab_size: int
    dtype: torch.dtype

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[..., V'] of [..., E]."""
        return product(self.matrix, rows, self.dtype)

    def in_target_ids(self, logits: torch.Tensor, reduction: Reduction | None) -> torch.Tensor:
        """Logits [T, V], -inf outside the draft vocabulary, of logits [T, V']; or what a reduction makes of them."""
        if self.ids is None:
            return reduced(logits, reduction)
        return reduced_part(logits, reduction, self.ids, self.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class TorchNorm:
    """`layers.Norm` on other devices."""

    weight: torch.Tensor  # float32[E]
    eps: float

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[..., E] of [..., E]."""
        return functional.rms_norm(rows.float(), rows.shape[-1:], self.weight, self.eps)


class TorchRotations:
    """`layers.Rotations` on other devices, or of more dimensions."""

    def __init__(self, rotations: Rotations, device: torch.device):
        self._cos, self._sin = (torch.from_numpy(of).to(device) for of in (rotations.cos, rotations.sin))

    def of(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[..., H, D] at positions int64[...]."""
        cos, sin = (of[positions][..., None, :] for of in (self._cos, self._sin))
        left, right = heads.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class HeadWeights:
    """The tensors of a head by name, on the target's device and in its type. Each is taken once; `finish` refuses those that are left.
    Those of the target stand in for an embedding and an output matrix that it lacks.

    ConfigurationError: a tensor is missing or has another shape than config.json and the target make it.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], network: Any):
        """network: the target, of transformers; its layers replaced or not."""
        self._tensors, self._network = tensors, network
        self._embedding: torch.Tensor = network.get_input_embeddings().weight
        self.vocab_size, self.target_size = self._embedding.shape
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self.has_kernels = self.device.type == "cpu" and self.dtype in SERVED
        self._config = network.config.get_text_config()
        self.num_target_layers = int(self._config.num_hidden_layers)
        self.context = context_of(self._config) or DEFAULT_MAX_LEN

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._tensors:
            raise refusal(f"tensor {name} is missing")
        found = self._tensors.pop(name)
        if shape and found.shape != shape:
            raise refusal(f"{name}: shape {list(found.shape)}; config.json and the target make it {list(shape)}")
        return found.to(self.device, self.dtype)

    def linear(self, sizes: dict[str, int], num_inputs: int) -> Any:
        """One layer of the matrices with these names, side by side. sizes: their numbers of outputs."""
        weight = torch.cat([self.take(f"{name}.weight", size, num_inputs) for name, size in sizes.items()])
        biases = [self.take(f"{name}.bias", size) for name, size in sizes.items() if f"{name}.bias" in self]
        if biases and len(biases) < len(sizes):
            raise refusal(f"some of {', '.join(sizes)} have a bias and some have none")
        return self._linear_of(weight, torch.cat(biases) if biases else None)

    def _linear_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if self.has_kernels:
            return Linear(weight.contiguous(), bias)
        return partial(functional.linear, weight=weight, bias=bias)

    def norm(self, name: str, eps: float, size: int) -> Any:
        weight = self.take(f"{name}.weight", size).float()
        return Norm(weight.numpy(), eps) if self.has_kernels else TorchNorm(weight, eps)

    def head_norms(self, counts: dict[str, int], dim: int) -> Any:
        """float32[H, dim] of norms that are equal for all heads of a kind. counts: numbers of these."""
        found = [self.take(f"{name}.weight", dim).float().expand(num, -1) for name, num in counts.items()]
        return torch.cat(found).numpy() if self.has_kernels else torch.cat(found)

    def torch_norm(self, name: str, size: int, eps: float) -> TorchNorm:
        """Of rows of any number of dimensions."""
        return TorchNorm(self.take(f"{name}.weight", size).float(), eps)

    def embedding(self, size: int) -> torch.Tensor:
        """[V, size]: its own, or the target's."""
        if "embed_tokens.weight" in self:
            return self.take("embed_tokens.weight", self.vocab_size, size)
        if self.target_size != size:
            raise refusal(f"hidden_size: {size}, the target has {self.target_size}, and embed_tokens.weight is missing")
        return self._embedding

    @property
    def embedding_scale(self) -> float:
        """Factor of the rows of `embedding`, to be asked before it is taken: targets like Gemma scale theirs in the module that looks them
        up, and a head that uses this module was trained with scaled rows."""
        module = self._network.get_input_embeddings()
        return 1.0 if "embed_tokens.weight" in self else float(getattr(module, "scalar_embed_scale", 1.0))

    def output(self, size: int) -> Output:
        """The output matrix [V', size] over the draft vocabulary, rows in ascending order of the target's ids."""
        d2t, t2d = self._tensors.pop("d2t", None), self._tensors.pop("t2d", None)
        if d2t is not None and (d2t.ndim != 1 or not len(d2t)):
            raise refusal(f"d2t: shape {list(d2t.shape)}; it must hold one offset for each token of the draft")
        ids = None if d2t is None else torch.arange(len(d2t)) + d2t.long()
        own = self.take("lm_head.weight") if "lm_head.weight" in self else None
        if own is not None and (own.ndim != 2 or own.shape[1] != size):
            raise refusal(f"lm_head.weight: shape {list(own.shape)}; config.json makes it [tokens, {size}]")
        if own is None and self.target_size != size:
            raise refusal(f"hidden_size: {size}, the target has {self.target_size}, and lm_head.weight is missing")
        if own is not None and len(own) != (self.vocab_size if ids is None else len(ids)):
            missing = "d2t is missing" if ids is None else f"d2t has {len(ids)}"
            raise refusal(f"lm_head.weight has {len(own)} rows, the target {self.vocab_size} tokens, and {missing}")
        if ids is None:
            matrix = self._network.get_output_embeddings() if own is None else self._linear_of(own)
            return Output(matrix, None, self.vocab_size, self.dtype)
        distinct = set(ids.tolist())
        known = len(distinct) == len(ids) and distinct <= set(range(self.vocab_size))
        if not known or (t2d is not None and t2d.nonzero().flatten().tolist() != sorted(distinct)):
            raise refusal(
                f"d2t: i + d2t[i] are not {len(ids)} different tokens of t2d and a vocabulary of {self.vocab_size}; "
                "it must hold offsets"
            )
        order = ids.argsort()
        ids = ids[order].to(self.device)
        rows = self._target_output(ids) if own is None else own.index_select(0, order.to(self.device))
        return Output(self._linear_of(rows), ids, self.vocab_size, self.dtype)

    def _target_output(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n, E] of the target's output matrix."""
        head = self._network.get_output_embeddings()
        if isinstance(head, Linear):
            return head.weight_of(ids)
        weight: torch.Tensor = self._embedding if self._config.tie_word_embeddings else head.weight
        return weight.index_select(0, ids)

    def finish(self) -> None:
        """ConfigurationError if tensors are left, which no head known here has."""
        if self._tensors:
            raise refusal(f"tensors {', '.join(sorted(self._tensors)[:4])} belong to no head known here")


def rotations(config: Any, num_positions: int, dim: int) -> Rotations:
    """float32[num_positions, dim / 2] by the settings of config.json."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return Rotations.of(LlamaRotaryEmbedding(config), num_positions, dim)


# -- files ------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head. ConfigurationError if it cannot be read, or asks for a verification that is not lossless."""
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as wrong:
        raise refusal(f"{folder}: config.json cannot be read ({wrong})") from wrong
    for method in (raw.get("speculators_config") or {}).get("proposal_methods") or ():
        for name, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0.0)):
            if method.get(name, lossless) != lossless:
                raise refusal(f"{name}: {method[name]} is lossy, verification here never is; set it to {lossless}")
    return raw


def check_attention(num_q: int, num_kv: int) -> None:
    """ConfigurationError unless each head of keys and values serves equally many query heads."""
    if num_kv < 1 or num_q < 1 or num_q % num_kv:
        raise refusal(f"num_key_value_heads: {num_kv}; give a divisor of num_attention_heads {num_q}")


def layer_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings of the decoder layers: of `transformer_layer_config` if there is one, otherwise of the file itself."""
    own = {key: value for key, value in raw.items() if key not in ("transformer_layer_config", "speculators_config")}
    found = {**own, **(raw.get("transformer_layer_config") or {})}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(name), dict):
            found[name] = _of_text(found[name])
    return found


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """Settings of positions that hold for a head. Where they differ between kinds of layers, speculators takes those of sliding ones;
    positions of several axes ("mrope") are equal on all of them in a text."""
    rope = next((rope[kind] for kind in (SLIDING, FULL) if isinstance(rope.get(kind), dict)), rope)
    if "mrope" in (rope.get("rope_type"), rope.get("type")):
        plain = {key: value for key, value in rope.items() if key not in ("type", "mrope_section")}
        return plain | {"rope_type": "default"}
    return rope


def read_tensors(folder: Path, *, prefixes: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors in a folder, by their names without these prefixes."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            found.update(load_file(file))
        if not files:  # early heads: tensors in an archive of torch, of which nothing but tensors is read
            found = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    except Exception as wrong:  # readers of damaged files raise many types
        raise refusal(f"{folder}: no weights that can be read ({type(wrong).__name__}: {wrong})") from wrong
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        if not name.endswith("rotary_emb.inv_freq"):  # follows from the configuration
            tensors[name] = tensor
    return tensors


def refusal(why: str) -> ConfigurationError:
    return ConfigurationError(f"head: {why}")
