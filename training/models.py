"""The two architectures of the demo pair, and how a model is written to disk."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.tokenizer import MAX_LENGTH, VOCAB_SIZE

# Deep and narrow: seven layers make a target step clearly dearer than a draft step even where fixed costs rule.
TARGET_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Two layers, the fewest that can copy from the context (one to look back, one to match), which code rewards.
DRAFT_SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def build(shape: dict[str, Any]) -> LlamaForCausalLM:
    """A freshly initialised Llama of this shape; draws from torch's global generator."""
    config = LlamaConfig(
        **shape,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a complete Hugging Face folder with bfloat16 weights (half the bytes; exact when read as float32)."""
    rounded = copy.deepcopy(model).bfloat16()
    rounded.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name every release of transformers knows
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def training_forward(model: LlamaForCausalLM, compiled: bool) -> Callable[..., Any]:
    """The model as training calls it: compiled for each window length (about a quarter faster), or as it is."""
    if not compiled:
        return model
    torch._dynamo.config.suppress_errors = True  # a machine where compiling fails trains on without
    return torch.compile(model, dynamic=False)


def load(folder: Path) -> LlamaForCausalLM:
    """The model of a folder in float32: what is measured and distilled is what is shipped, rounding included."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)
