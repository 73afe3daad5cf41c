"""Log-probabilities of emitted tokens: the target's own law, before any processor.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rootward.core.requests import TokenLogprob
from rootward.engine.sampling import top_atoms


@torch.inference_mode()
def token_logprobs(logits_RV: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Of one token per row, and of the `num_top` likeliest tokens of the row; ties go to the smaller id."""
    logprobs = torch.log_softmax(logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float(), -1).float()
    index = torch.tensor(tokens, device=logprobs.device)[:, None]
    own = logprobs.gather(1, index)[:, 0].tolist()
    if not num_top:
        return [TokenLogprob(value) for value in own]
    ids, values = top_atoms(logprobs, num_top)
    pairs = zip(own, ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprob(value, tuple(zip(row, best, strict=True))) for value, row, best in pairs]
