"""A draft head in the published format of EAGLE-3 (arXiv 2503.01840), as it is trained: many chats at once, several steps unrolled.

Index t of a chat holds the hidden states of token t and the embedding of token t + 1; the output there is the draft distribution of
token t + 2, so the target distribution that it is compared with is the one at position t + 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

FORMAT = "LlamaForCausalLMEagle3"
# Positions that a head sees: chats to learn from are about as long, and distances that it never saw mislead it.
WINDOW = 256
SLIDING = ["sliding_attention"]  # `layer_types` of a head with a window


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = _Attention(
            hidden, config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        )
        self.mlp = _Mlp(hidden, config["intermediate_size"])


class DraftHead(nn.Module):
    """The trained tensors under their published names. The output rows are the target's and are not part of it."""

    def __init__(self, config: dict[str, Any], draft_ids: torch.Tensor) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.config = config
        self.fc = nn.Linear(config["num_aux_hidden_states"] * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer(
            "scale", torch.ones(config["num_aux_hidden_states"] * hidden)
        )  # of the states' components; part of fc in the file
        self._frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, config["head_dim"], 2) / config["head_dim"])

    def unroll(
        self, states: torch.Tensor, embeddings: torch.Tensor, answer: torch.Tensor, num_steps: int
    ) -> Iterator[torch.Tensor]:
        """The normed outputs `[rows, hidden]` of each step at the indices where `answer` `[B, T]` is true.

        Step k at index t continues the drafts of t - 1: its attention reads the target-fed entries up to t - k and the k entries that
        the chain itself appended (training-time test, section 3.2). states: `[B, T, layers * hidden]`; embeddings: `[B, T, hidden]` of
        the next tokens.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        batch, length, hidden = embeddings.shape
        rows = answer.flatten().nonzero()[:, 0]
        weight = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        from_embedding = functional.linear(layer.input_layernorm(embeddings), weight[:, :hidden])
        rotary = self._rotary(length, embeddings)
        distance = (
            torch.arange(length, device=embeddings.device)[:, None]
            - torch.arange(length, device=embeddings.device)[None]
        )
        current = self.fc(states / self.scale)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(num_steps):
            mixed = from_embedding + functional.linear(layer.hidden_norm(current), weight[:, hidden:])
            query, key, value = self._split(mixed, rotary)
            keys.append(key)
            values.append(value)
            visible = distance >= step
            if self.config.get("layer_types") == SLIDING:  # other heads see everything
                visible &= distance < self.config["sliding_window"]
            attended = self._attend(query, keys, values, visible)
            residual = current.flatten(0, 1)[rows] + attention.o_proj(attended.flatten(0, 1)[rows])
            output = residual + layer.mlp(layer.post_attention_layernorm(residual))
            yield self.norm(output)
            if step + 1 < num_steps:
                scattered = torch.zeros(batch * length, hidden, dtype=output.dtype, device=output.device).index_copy(
                    0, rows, output
                )
                scattered = scattered.view(batch, length, hidden)
                current = torch.cat([torch.zeros_like(scattered[:, :1]), scattered[:, :-1]], 1)

    def _rotary(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(length)[:, None] * self._frequencies[None]
        return angles.cos().to(like)[None, :, None], angles.sin().to(like)[None, :, None]

    def _split(
        self, mixed: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[B, KV heads, group, T, D]`, keys and values `[B, KV heads, T, D]`."""
        heads, kv_heads, dim = (
            self.config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        batch, length, _ = mixed.shape
        query, key, value = mixed.view(batch, length, -1, dim).split([heads, kv_heads, kv_heads], 2)
        query, key = (_rotate(x, *rotary) for x in (query, key))
        grouped = query.view(batch, length, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
        return grouped, key.transpose(1, 2), value.transpose(1, 2)

    def _attend(
        self, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], visible: torch.Tensor
    ) -> torch.Tensor:
        """`[B, T, heads * D]`: attention to the target-fed entries that are visible and, at t, to entry t - (k - j) of each later step j
        <= k.
        """
        batch, kv_heads, group, length, dim = query.shape
        query = query * dim**-0.5
        scores = (query.reshape(batch, kv_heads, group * length, dim) @ keys[0].mT).view(
            batch, kv_heads, group, length, length
        )
        scores = scores.masked_fill(~visible, float("-inf"))
        last = len(keys) - 1
        if not last:
            weights = scores.softmax(-1)
            mixed = (weights.view(batch, kv_heads, group * length, length) @ values[0]).view(query.shape)
        else:
            own = [(query * _delayed(keys[j], last - j)[:, :, None]).sum(-1, keepdim=True) for j in range(1, last + 1)]
            weights = torch.cat([scores, *own], -1).softmax(-1)
            mixed = (weights[..., :length].reshape(batch, kv_heads, group * length, length) @ values[0]).view(
                query.shape
            )
            for j in range(1, last + 1):
                mixed = mixed + weights[..., length + j - 1, None] * _delayed(values[j], last - j)[:, :, None]
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, -1)

    @classmethod
    def load(cls, folder: Path) -> DraftHead:
        """A head that `save` wrote, in float32."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        offsets = tensors.pop("d2t")
        head = cls(config, offsets + torch.arange(len(offsets)))
        del tensors["t2d"]
        head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()} | {"scale": head.scale})
        return head

    def save(self, folder: Path, vocabulary: int) -> None:
        """Write config.json and model.safetensors (bfloat16, `d2t` as offsets) as published heads have them."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.state_dict()
        weights["fc.weight"] = weights["fc.weight"] / weights.pop("scale")
        tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in weights.items()}
        ids = self.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        partial = folder / "model.safetensors.new"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _delayed(x: torch.Tensor, steps: int) -> torch.Tensor:
    """`[.., T, D]` moved `steps` later; the beginning repeats, where no chain reaches."""
    return (
        x if not steps else torch.cat([x[..., :1, :].expand(*x.shape[:-2], steps, x.shape[-1]), x[..., :-steps, :]], -2)
    )


def head_config(target: Any, draft_vocab: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """config.json of a head for this target config; `layers`: the layers whose inputs it reads."""
    return {
        "architectures": [FORMAT],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        "num_hidden_layers": 1,
        "layer_types": SLIDING,
        "sliding_window": WINDOW,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_parameters["rope_theta"],
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "num_aux_hidden_states": len(layers),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
