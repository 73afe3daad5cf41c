"""First weights of a draft head by least squares, before any gradient: worth epochs of training where text is scarce.

The vector that enters the head's final norm should point where the target's own does. With x_t the target's final hidden state at
position t (its norm's weight divided out) and e_t the normed embedding of token t:

    fc          x_(t+1) from the hidden states of position t, fitted together with
    attention   x_(t+1) from e_(t+1): keys are random projections of embeddings, so that an entry attends to itself; values and outputs
    hold the best
                approximation of the rank that the KV heads have
    MLP         what both leave of x_(t+1), from random gated units, on target-fed entries and then on unrolled ones too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from training.draft_head import DraftHead

RIDGE = 0.003
MLP_RIDGE = 0.01
SHARPNESS = 2.0  # of the attention of an entry to itself
GATE_SPREAD = 2.0
STEP_WEIGHT = 0.8


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch as `DraftHead.unroll` takes it, and the final hidden states `[rows, hidden]` (norm's weight divided out) at the positions
    that follow.
    """

    states: torch.Tensor
    embeddings: torch.Tensor
    wanted: torch.Tensor
    following: torch.Tensor


@torch.no_grad()
def warm_start(head: DraftHead, samples: Callable[[], Iterable[Sample]], *, norm: torch.Tensor, num_steps: int) -> None:
    """Set all weights of `head`. norm: weight of the target's final norm; `samples()` starts over at each call."""
    head.norm.weight.copy_(norm)
    states, embedding, following = zip(
        *((s.states[s.wanted], _normed(s.embeddings[s.wanted]), s.following) for s in samples()), strict=True
    )
    head.scale.copy_(torch.cat(states).pow(2).mean(0).sqrt().clamp(min=1e-6))
    inputs = [torch.cat([x / head.scale, e], 1) for x, e in zip(states, embedding, strict=True)]
    width = states[0].shape[1]
    gram = sum(x.mT @ x for x in inputs)
    moment = sum(x.mT @ y for x, y in zip(inputs, following, strict=True))
    solution = _solve(gram, moment, RIDGE)
    head.fc.weight.copy_(solution[:width].mT)
    mean = torch.cat(embedding).mean(0)
    _attend_to_itself(head, solution[width:], gram[width:, width:] / len(torch.cat(following)), mean)
    mlp = head.midlayer.mlp
    hidden = head.norm.weight.shape[0]
    head.midlayer.post_attention_layernorm.weight.fill_(1.0)
    mlp.gate_proj.weight.normal_(std=GATE_SPREAD / hidden**0.5)
    mlp.up_proj.weight.normal_(std=1 / hidden**0.5)
    mlp.down_proj.weight.zero_()
    for steps in sorted({1, num_steps}):
        _fit_mlp(head, samples(), steps)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def _solve(gram: torch.Tensor, moment: torch.Tensor, ridge: float) -> torch.Tensor:
    diagonal = gram.diagonal()
    return torch.linalg.solve(gram + torch.diag(ridge * (diagonal + diagonal.mean())), moment)


def _attend_to_itself(head: DraftHead, linear: torch.Tensor, covariance: torch.Tensor, mean: torch.Tensor) -> None:
    """Attention that maps an entry's normed embedding by `linear` `[hidden, hidden]`, as near as the rank of the values allows."""
    attention, dim = head.midlayer.self_attn, head.config["head_dim"]
    heads, kv_heads = head.config["num_attention_heads"], head.config["num_key_value_heads"]
    hidden, group = len(mean), heads // kv_heads
    rank = min(kv_heads * dim, hidden)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.zero_()
    values, vectors = torch.linalg.eigh(covariance)
    root = values.clamp(min=1e-6).sqrt()
    left, strength, right = torch.linalg.svd((vectors * root @ vectors.mT) @ linear)
    into = (vectors / root @ vectors.mT) @ left[:, :rank] * strength[:rank].sqrt()
    out = strength[:rank, None].sqrt() * right[:rank]
    attention.v_proj.weight[:rank, :hidden] = into.mT
    common = mean / mean.norm()
    for kv_head in range(kv_heads):
        noise = torch.randn(hidden, dim).to(mean)
        keys = torch.linalg.qr(noise - common[:, None] * (common @ noise))[0].mT
        own = slice(kv_head * dim, (kv_head + 1) * dim)
        attention.k_proj.weight[own, :hidden] = keys
        part = out[own]
        for query_head in range(kv_head * group, (kv_head + 1) * group):
            at = query_head * dim
            attention.q_proj.weight[at : at + dim, :hidden] = SHARPNESS * keys
            attention.o_proj.weight[:, at : at + len(part)] = part.mT / group


def _fit_mlp(head: DraftHead, samples: Iterable[Sample], num_steps: int) -> None:
    mlp = head.midlayer.mlp
    residuals: list[torch.Tensor] = []
    hook = head.midlayer.post_attention_layernorm.register_forward_pre_hook(
        lambda _, inputs: residuals.append(inputs[0])
    )
    units = mlp.gate_proj.weight.shape[0]
    gram, moment = torch.zeros(units, units).to(head.scale), torch.zeros(units, len(head.norm.weight)).to(head.scale)
    for sample in samples:
        residuals.clear()
        for _ in head.unroll(sample.states, sample.embeddings, sample.wanted, num_steps):
            pass
        rank = (sample.wanted.long().cumsum(1) - 1)[sample.wanted]
        for step, residual in enumerate(residuals):
            behind = rank >= step
            x = _normed(residual[behind])
            hidden = functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
            gram += STEP_WEIGHT**step * hidden.mT @ hidden
            moment += STEP_WEIGHT**step * hidden.mT @ (sample.following[behind] - residual[behind])
    hook.remove()
    mlp.down_proj.weight.copy_(_solve(gram, moment, MLP_RIDGE).mT)
