"""What the model card states: held-out loss, and how much of the draft law the target law accepts."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from training.batches import chunks
from training.sampling import continue_rows

TEMPERATURES = (0.0, 0.7, 1.0)
PROMPT_LENGTH = 64
CONTINUATION_LENGTH = 128


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Mean negative log-likelihood a token, in nats, over windows `[B, L + 1]`."""
    total = 0.0
    for part in chunks(rows, 4):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / rows[:, 1:].numel()


def overlap(target_logits: torch.Tensor, draft_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sum over tokens of min(p, q), the chance that one draft token is accepted; at temperature 0, equal argmax."""
    if temperature == 0:
        return (target_logits.argmax(-1) == draft_logits.argmax(-1)).float()
    p = torch.softmax(target_logits / temperature, -1)
    q = torch.softmax(draft_logits / temperature, -1)
    return torch.minimum(p, q).sum(-1)


@torch.inference_mode()
def acceptance(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: torch.Tensor, temperatures: Sequence[float], skip: int = 0
) -> list[float]:
    """Mean overlap over the positions of `rows` from `skip` on, one number a temperature."""
    sums = torch.zeros(len(temperatures), dtype=torch.float64)
    count = 0
    for part in chunks(rows, 4):
        p, q = (m(input_ids=part[:, :-1], use_cache=False).logits[:, skip:].float() for m in (target, draft))
        sums += torch.stack([overlap(p, q, t).sum(dtype=torch.float64) for t in temperatures])
        count += p.shape[0] * p.shape[1]
    return (sums / count).tolist()


def acceptance_on_own_text(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: torch.Tensor) -> list[float]:
    """Acceptance where it is met in service: on continuations that the target draws itself, per temperature.

    Only positions whose next token the target drew count; `prompts` is `[B, PROMPT_LENGTH]`.
    """
    result = []
    for temperature in TEMPERATURES:
        rows = continue_rows(target, prompts, CONTINUATION_LENGTH, torch.full((len(prompts),), temperature), 0)
        result += acceptance(target, draft, rows, [temperature], skip=prompts.shape[1] - 1)
    return result
