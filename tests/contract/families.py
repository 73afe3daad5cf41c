"""Tiny random networks of the architecture families that the engine promises to run, and of those that it must refuse.

A family is the name of a configuration class of transformers and what differs from SHAPE. Sliding windows are short enough
for a few tokens to reach past them, and there are as many layers as it takes to have one of every kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCAB, WINDOW = 96, 5
SHAPE: dict[str, Any] = {
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
GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
HEAD, SLIDING = {"head_dim": 8}, {"sliding_window": WINDOW}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **SLIDING}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
    **LATENT,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@dataclass(frozen=True)
class Family:
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=lambda: SHAPE)

    @property
    def exists(self) -> bool:
        """Whether this release of transformers has it."""
        return hasattr(transformers, self.config)

    def network(self, seed: int = 0) -> Any:
        """A random network, its weights large enough for logits of order one and attention that matters."""
        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**self.shape, **self.changes})
        network = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in network.parameters():
                if weight.ndim > 1:
                    weight.mul_(4.0)
        return network.eval()


SUPPORTED = {
    "llama": Family("LlamaConfig"),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", HEAD),
    "qwen3_moe": Family("Qwen3MoeConfig", {**HEAD, **EXPERTS, "num_experts": 4}),
    "mistral": Family("MistralConfig", SLIDING),
    "ministral": Family("MinistralConfig", {**HEAD, **MIXED}),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 4}),
    "phi": Family("PhiConfig"),
    "phi3": Family("Phi3Config", SLIDING),
    "gemma": Family("GemmaConfig", HEAD),
    "gemma2": Family("Gemma2Config", {**HEAD, **MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": Family("Gemma3TextConfig", {**HEAD, **MIXED, "query_pre_attn_scalar": 8}),
    "olmo": Family("OlmoConfig"),
    "olmo2": Family("Olmo2Config"),
    "olmo3": Family("Olmo3Config", MIXED),
    "olmoe": Family("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": Family("CohereConfig"),
    "cohere2": Family("Cohere2Config", MIXED),
    "smollm3": Family("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": Family("GraniteConfig"),
    "glm4": Family("Glm4Config", HEAD),
    "starcoder2": Family("Starcoder2Config", SLIDING),
    "stablelm": Family("StableLmConfig"),
    "gpt_neox": Family("GPTNeoXConfig"),
    "gpt2": Family("GPT2Config", shape=GPT),
    "opt": Family("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "nemotron": Family("NemotronConfig"),
    "exaone4": Family("Exaone4Config", MIXED),
    "helium": Family("HeliumConfig", HEAD),
    "hunyuan_v1_dense": Family("HunYuanDenseV1Config", HEAD),
    "ernie4_5": Family("Ernie4_5Config", HEAD),
    "seed_oss": Family("SeedOssConfig", HEAD),
    "apertus": Family("ApertusConfig"),
    "arcee": Family("ArceeConfig"),
    "falcon": Family("FalconConfig", {"multi_query": True, "new_decoder_architecture": False, "alibi": False}),
    "deepseek_v3": Family("DeepseekV3Config", DEEPSEEK),
    "gpt_oss": Family("GptOssConfig", {**HEAD, **MIXED, **ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}

REFUSED = {
    "bloom": Family("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mpt": Family("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB}, {}),
    "falcon_alibi": Family("FalconConfig", {"alibi": True}),
    "gpt_neo": Family(
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "llama4": Family(
        "Llama4TextConfig", {**HEAD, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 4}
    ),
    "mamba": Family("MambaConfig", {"state_size": 4}),
    "mamba2": Family("Mamba2Config", {"state_size": 4, "head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8}),
    "falcon_mamba": Family("FalconMambaConfig", {"state_size": 4}),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig",
        {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    ),
    "jamba": Family(
        "JambaConfig", {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    ),
    "bamba": Family(
        "BambaConfig",
        {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    ),
    "lfm2": Family("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        {
            **HEAD,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}
