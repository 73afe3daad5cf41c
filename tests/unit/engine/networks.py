"""Tiny random networks of many families, and the slow truth about them: one cache-free forward per path."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers

from rootward.engine.probe import eager
from rootward.engine.tree_attention import NAMES

VOCAB = 96
WINDOW = 5
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
}
# family -> (class of its configuration, what differs from SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": WINDOW, "num_hidden_layers": 7}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", GPT2),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": WINDOW}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3Config", MLA),
}


def tiny(config: str, seed: int = 0, **changes: Any) -> Any:
    """A random network of this configuration class, its weights large enough for logits of order one."""
    transformers.utils.logging.set_verbosity_error()
    shape = changes if config == "GPT2Config" else {**SHAPE, **changes}
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**shape))
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return network.eval()


def own_attention(network: Any) -> AbstractContextManager[None]:
    """A network that the engine has taken over runs without the engine's cache in this context."""
    return eager(network) if network.config._attn_implementation in NAMES else nullcontext()


@torch.inference_mode()
def truth(network: Any, context: Sequence[int]) -> torch.Tensor:
    """Logits [V] of what follows this context, by a forward that knows neither cache nor tree."""
    with own_attention(network):
        logits: torch.Tensor = network(input_ids=torch.tensor([list(context)]), use_cache=False).logits
    return logits[0, -1].float()
