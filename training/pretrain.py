"""The target's training: next-token prediction on the training files."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from training.batches import Windows
from training.budget import Budget, learning_rate
from training.measure import held_out_loss
from training.models import training_forward
from training.progress import Progress

PEAK = 2e-3
TOKENS_PER_STEP = 2048
NUM_EVALUATIONS = 12
# Short windows first (cheaper a token), long ones last, so that every position up to the context limit is trained.
LENGTHS = ((0.6, 256), (0.85, 512), (1.01, 1024))


def window_length(progress: float) -> int:
    """Tokens a window holds at this fraction of the training."""
    return next(length for until, length in LENGTHS if progress < until)


def optimizer_for(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and spares the norms' gains."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, rate: float) -> None:
    """One clipped optimiser step at this learning rate."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def evaluation_marks() -> Iterator[float]:
    """The fractions of a phase at which the held-out loss is measured."""
    return iter([(i + 1) / NUM_EVALUATIONS for i in range(NUM_EVALUATIONS - 1)] + [2.0])


def pretrain(
    model: LlamaForCausalLM,
    windows: Windows,
    held_out: torch.Tensor,
    budget: Budget,
    progress: Progress,
    on_evaluation: Callable[[LlamaForCausalLM], None],
    compiled: bool = False,
) -> None:
    """Train in place until the budget is spent; `on_evaluation` may save what is there, off the clock."""
    optimizer = optimizer_for(model, PEAK)
    forward = training_forward(model, compiled)
    marks = evaluation_marks()
    mark = next(marks)
    while (done := budget.progress()) < 1:
        length = window_length(done)
        batch = windows.next(TOKENS_PER_STEP // length, length)
        with torch.autocast("cpu", torch.bfloat16):
            logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        update(model, optimizer, loss, learning_rate(PEAK, done))
        budget.steps_done += 1
        progress.step(done, loss.item())
        if done >= mark:
            mark = next(marks)
            progress.evaluated(budget.steps_done, held_out_loss(model, held_out))
            with budget.paused():
                on_evaluation(model)
    progress.evaluated(budget.steps_done, held_out_loss(model, held_out))
    progress.close()
