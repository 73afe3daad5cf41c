"""Continuations drawn from a model, many rows at once."""

import torch
from transformers import DynamicCache, LlamaForCausalLM


def draw(logits_BV: torch.Tensor, temperature_B: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token a row `[B]`; a row of temperature 0 takes the most likely one."""
    greedy = logits_BV.argmax(-1)
    warm = temperature_B.clamp(min=0.05)[:, None]
    sampled = torch.multinomial(torch.softmax(logits_BV / warm, -1), 1, generator=generator)[:, 0]
    return torch.where(temperature_B > 0, sampled, greedy)


@torch.inference_mode()
def continue_rows(
    model: LlamaForCausalLM, prompts_BL: torch.Tensor, num_new: int, temperature_B: torch.Tensor, seed: int
) -> torch.Tensor:
    """Prompts and continuations `[B, L + num_new]`; a seed of its own, so that threads may draw side by side.

    Prompts have one length, and rows run on past end-of-text as the training stream does.
    """
    cache = DynamicCache(config=model.config)
    rows, fresh = prompts_BL, prompts_BL
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_new):
        output = model(input_ids=fresh, past_key_values=cache, use_cache=True, logits_to_keep=1)
        fresh = draw(output.logits[:, -1].float(), temperature_B, generator)[:, None]
        rows = torch.cat([rows, fresh], 1)
    return rows.clone()
