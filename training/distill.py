"""The draft's training: imitate the target's law, on library text and on text that the target drew itself.

In service the draft guesses at text the target wrote, so a good part of the training is on such text.
Notation: p is the target's law, q the draft's, over V tokens.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from transformers import LlamaForCausalLM

from training.batches import Windows
from training.budget import Budget, learning_rate
from training.measure import held_out_loss
from training.pretrain import evaluation_marks, optimizer_for, update
from training.progress import Progress
from training.sampling import continue_rows

PEAK = 3e-3
TOKENS_PER_STEP = 2048
LENGTHS = ((0.6, 256), (0.88, 512), (1.01, 1024))
# Total variation is the rejected share itself, yet its gradient is small where p and q are far apart; KL leads there.
TV_WEIGHT = 1.0
POOL_LENGTH = 256
POOL_PROMPT = 48
POOL_BATCH = 96
# Greedy rows end in loops for a model this small, so they are few.
POOL_TEMPERATURES = (1.0, 1.0, 1.0, 0.7, 0.7, 0.0)
# A row drawn by the target is reused this often on average: drawing costs several times what a training step does.
POOL_REUSE = 4.0


def imitation_loss(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """KL(p || q) + TV(p, q), mean over positions."""
    log_p = torch.log_softmax(target_logits.float(), -1)
    log_q = torch.log_softmax(draft_logits.float(), -1)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    tv = 0.5 * (p - log_q.exp()).abs().sum(-1)
    return (kl + TV_WEIGHT * tv).mean()


def draw_pool(target: LlamaForCausalLM, windows: Windows, budget: Budget, num_threads: int) -> torch.Tensor:
    """Rows `[B, POOL_LENGTH + 1]` that begin with library text and go on as the target likes, until time is up."""
    temperatures = torch.tensor(POOL_TEMPERATURES).repeat(POOL_BATCH // len(POOL_TEMPERATURES))
    rows: list[torch.Tensor] = []
    progress = Progress("drawing")

    def draw_one(prompts: torch.Tensor, seed: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return continue_rows(target, prompts, POOL_LENGTH + 1 - POOL_PROMPT, temperatures, seed)

    with ThreadPoolExecutor(num_threads) as threads:
        while (done := budget.progress()) < 1 or not rows:
            prompts = [windows.next(POOL_BATCH, POOL_PROMPT)[:, :POOL_PROMPT] for _ in range(num_threads)]
            rows += threads.map(draw_one, prompts, range(len(rows), len(rows) + num_threads))
            progress.step(done)
    progress.close()
    return torch.cat(rows)


class MixedBatches:
    """Windows of library text, and at short lengths every other batch from the pool of drawn rows."""

    def __init__(self, windows: Windows, pool: torch.Tensor | None, seed: int) -> None:
        self._windows = windows
        self._pool = pool
        self._rng = np.random.default_rng(seed)
        self._pool_left = 0 if pool is None else int(POOL_REUSE * len(pool))

    def next(self, progress: float) -> torch.Tensor:
        """The next batch `[B, L + 1]` of about `TOKENS_PER_STEP` tokens."""
        length = next(length for until, length in LENGTHS if progress < until)
        if self._pool is not None and self._pool_left > 0 and self._rng.random() < 0.5:
            count = TOKENS_PER_STEP // POOL_LENGTH
            self._pool_left -= count
            return self._pool[torch.from_numpy(self._rng.integers(len(self._pool), size=count))]
        return self._windows.next(TOKENS_PER_STEP // length, length)


def law_of_target(target: LlamaForCausalLM, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and the target's logits on them; autocast and grad mode belong to the thread that calls."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return inputs, target(input_ids=inputs, use_cache=False).logits


def distill(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    batches: MixedBatches,
    held_out: torch.Tensor,
    budget: Budget,
    progress: Progress,
    peak: float = PEAK,
) -> None:
    """Train the draft in place until the budget is spent; the target stays as it is.

    The target runs one batch ahead in a thread of its own: both halves cost about the same, and two threads that meet
    once a step lose far less on a busy machine than two that meet in every operation.
    """
    optimizer = optimizer_for(draft, peak)
    marks = evaluation_marks()
    mark = next(marks)
    with ThreadPoolExecutor(1) as ahead:
        pending = ahead.submit(law_of_target, target, batches.next(0.0)[:, :-1])
        while (done := budget.progress()) < 1:
            inputs, p_logits = pending.result()
            pending = ahead.submit(law_of_target, target, batches.next(done)[:, :-1])
            with torch.autocast("cpu", torch.bfloat16):
                q_logits = draft(input_ids=inputs, use_cache=False).logits
            loss = imitation_loss(p_logits, q_logits)
            update(draft, optimizer, loss, learning_rate(peak, done))
            budget.steps_done += 1
            progress.step(done, loss.item())
            if done >= mark:
                mark = next(marks)
                progress.evaluated(budget.steps_done, held_out_loss(draft, held_out))
    progress.evaluated(budget.steps_done, held_out_loss(draft, held_out))
    progress.close()
