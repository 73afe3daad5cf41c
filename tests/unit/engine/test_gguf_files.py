"""GGUF files: what transformers does not read of them is refused, because it would be another model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rootward.engine.gguf_files import local_model
from rootward.engine.loading import load_model
from rootward.engine.tokenizers import byte_alphabet
from rootward.errors import ConfigurationError
from rootward.ports import Rows

VOCAB, HEADS, KV_HEADS = 260, 4, 2
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def a_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256}
    config = LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, initializer_range=0.2, **sizes, **heads)
    return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp: the two halves of a head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(
    file: Path, network: LlamaForCausalLM, *, without: str = "", more: str = "", scaling: str = "", parts: int = 0
) -> None:
    """A GGUF file of the network: without tensors that begin like this, with one more tensor, with scaled positions, as one of parts."""
    config, writer = network.config, gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(4.0)
    if parts:
        writer.add_uint16("split.count", parts)
    tokens = [*byte_alphabet(), "th", "he", "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    for name, tensor in network.state_dict().items():
        module, _, kind = name.rpartition(".")
        parts_of_name = module.split(".")
        at = f"blk.{parts_of_name[2]}." if "layers" in parts_of_name else ""
        own = f"{at}{NAMES['.'.join(parts_of_name[3:]) if at else module]}.{kind}"
        array = tensor.numpy()
        if "attn_q" in own or "attn_k" in own:
            array = interleaved(array, HEADS if "attn_q" in own else KV_HEADS)
        if not without or not own.startswith(without):
            writer.add_tensor(own, array)
    if more:
        writer.add_tensor(more, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_whole_file_is_the_network_that_was_written(tmp_path: Path) -> None:
    network = a_llama()
    write(tmp_path / "whole.gguf", network)
    model = load_model(str(tmp_path / "whole.gguf"), dtype="float32", max_slots=1, max_len=64)
    ids = list(range(3, 40))
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0]
    found = model.forward([Rows.chain(model.open(), 0, ids)])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"more": "rope_freqs.weight"}, "does not read rope_freqs.weight"),
        ({"more": "blk.0.attn_q.bias"}, r"does not read tensors \(8 of"),
        ({"scaling": "yarn"}, "scales positions by 'yarn'"),
        ({"scaling": "linear"}, "scales positions by 'linear'"),
        ({"without": "blk.1."}, "are missing"),
        ({"parts": 2}, "is one of 2 parts"),
    ],
    ids=str,
)
def test_a_file_that_would_be_read_as_another_model_is_refused(
    change: dict[str, str], words: str, tmp_path: Path, cache: Path
) -> None:
    write(tmp_path / "other.gguf", a_llama(), **change)
    with pytest.raises(ConfigurationError, match=words):
        local_model(str(tmp_path / "other.gguf"))
    assert not list((cache / "rootward" / "gguf").iterdir())
