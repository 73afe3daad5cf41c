"""Function-preserving inflation: a small trained Llama with the cost of a larger one.

Added decoder layers have random weights except o_proj = 0 and down_proj = 0, so both residual branches add exact zeros; added MLP rows have
zero down_proj columns. The function is that of the small model (checked here), memory traffic and arithmetic are those of the large
shape. Acceptance, text and law are a property of the small pair: every figure made with it must say so.

    python -m benchmarks.inflate --size 300M --layers 7 --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rootward import demo

TOLERANCE = 1e-3  # of logits of size ten: the reductions of a wider MLP round differently


def inflated(small: LlamaForCausalLM, num_layers: int, intermediate: int) -> LlamaForCausalLM:
    """A network of the same function with `num_layers` layers and MLPs of width `intermediate`."""
    shape = small.config.to_dict() | {"num_hidden_layers": num_layers, "intermediate_size": intermediate}
    torch.manual_seed(0)
    large = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in large.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        for name, weight in small.named_parameters():
            there = large.get_parameter(name)
            there[tuple(slice(0, size) for size in weight.shape)] = weight.float()
    return large


def check_same_function(small: LlamaForCausalLM, large: LlamaForCausalLM) -> float:
    """Largest difference of the logits on random tokens. ValueError if it is more than rounding."""
    tokens = torch.randint(0, small.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        error = float((small(tokens).logits - large(tokens).logits).abs().max())
    if not error < TOLERANCE:
        raise ValueError(f"the inflated model differs by {error}")
    return error


def save_inflated(source: Path, out: Path, num_layers: int, intermediate: int) -> tuple[int, int]:
    """Write the folder (float32); returns (original, inflated) numbers of parameters."""
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    large = inflated(small, num_layers, intermediate)
    error = check_same_function(small, large)
    large.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / file).is_file():
            shutil.copy(source / file, out / file)
    sizes = (sum(p.numel() for p in small.parameters()), sum(p.numel() for p in large.parameters()))
    print(f"{sizes[0] / 1e6:.1f} M parameters inflated to {sizes[1] / 1e6:.1f} M; logits differ by {error:.1e}")
    return sizes


def width_for(config: dict[str, Any], num_layers: int, size: int) -> int:
    """The smallest MLP width, a multiple of 64, that gives `num_layers` Llama layers and the embedding `size` parameters."""
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    tables = 1 if config["tie_word_embeddings"] else 2
    rest = size - tables * config["vocab_size"] * hidden - num_layers * (attention + 2 * hidden) - hidden
    width = max(-(-rest // (3 * hidden * num_layers)), config["intermediate_size"])
    return int(-(-width // 64) * 64)


def parameters(text: str) -> int:
    """`300M`, `1.5G` or a plain number, as a number of parameters."""
    units = {"M": 1e6, "G": 1e9}
    try:
        number = int(float(text.rstrip("MG")) * units.get(text[-1:], 1.0))
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write for example 300M")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo.paths().target, help="Llama folder (default: demo target)")
    parser.add_argument("--size", type=parameters, default="300M", help="number of parameters (default 300M)")
    parser.add_argument("--layers", type=int, default=7, help="number of decoder layers (default 7)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the inflated model")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    save_inflated(args.model, args.out, args.layers, width_for(config, args.layers, args.size))


if __name__ == "__main__":
    main()
