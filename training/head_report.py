"""What a trained head is worth on text that it never saw: acceptance by step, simulated tokens a pass, and the card."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from training.card import draw_curves
from training.chat_store import ChatStore
from training.draft_head import DraftHead
from training.progress import Progress

STEPS = 4
BATCH_TOKENS = 4000

CARD = """\
# Draft head for {target}

EAGLE-3 format (arXiv 2503.01840): reads the inputs of layers {layers}; one decoder layer, {parameters:,} parameters in bfloat16,
{vocabulary:,} draft tokens. Its output matrix is the target's rows of these tokens, so the file has none. Made by

```
{command}
```

Text: {training_tokens:,} tokens that the target wrote itself, {training_chats:,} chats for training and {held_out_chats} held out (user
turns too; answers at temperatures 0 and 1, half each). Weights {start}, then {steps} steps over {visited_tokens:,} positions on
{processor}: {loss} over the draft vocabulary, {unrolled} unrolled steps.

## Acceptance

On the held-out chats, and on {prompt_chats} answers to prompts that people wrote (`rootward/demo/chats.jsonl`). Answers at T = 0: share of
positions where the likeliest draft token is the target's. T = 1: sum over tokens of min(p, q). Both
within the draft vocabulary: tokens outside of it are lost on top. Step k is measured behind k - 1 draft tokens
that were accepted. A chain of {length} gives 1 + sum over k of the product of the first k tokens a pass.

| text | T | KL, step 1 | step 1 | step 2 | step 3 | step 4 | tokens a pass, chain of {length} |
|---|---|---|---|---|---|---|---|
{rows}

![loss](loss.png)

All figures: `measured.json`.
"""


@torch.inference_mode()
def acceptance(head: DraftHead, loss_of: Any, store: ChatStore, chats: list[int]) -> list[dict[str, Any]]:
    """A row for each temperature of the text: KL, acceptance of each step, tokens a pass of a chain. `loss_of(chats)` gives (_, means)."""
    rows = []
    for temperature in (0.0, 1.0):
        own = [chat for chat in chats if store.temperature(chat) == temperature]
        total, count = torch.zeros(STEPS, 3, dtype=torch.float64), 0
        for group in store.batches(own, BATCH_TOKENS, random.Random(0)):
            positions = sum(len(store.answer_ids(chat)) for chat in group)
            total += positions * loss_of(group)[1].cpu()
            count += positions
        kl, overlap, agreement = (total / max(count, 1)).unbind(1)
        accepted = agreement if temperature == 0 else overlap
        row = {"temperature": temperature, "kl": kl[0].item(), "accepted": accepted.tolist()}
        rows.append(row | {"tokens_per_pass": 1 + accepted.cumprod(0).sum().item()})
    return rows


def write_report(folder: Path, measured: dict[str, Any], progress: Progress) -> None:
    """Card, figures and loss curve."""
    lines = []
    for name, label in (("held_out", "held-out chats"), ("prompts", "prompts of people")):
        for row in measured[name]:
            steps = " | ".join(f"{value:.3f}" for value in row["accepted"])
            lines.append(
                f"| {label} | {row['temperature']:.0f} | {row['kl']:.3f} | {steps} | {row['tokens_per_pass']:.2f} |"
            )
    (folder / "README.md").write_text(CARD.format(**measured, rows="\n".join(lines), length=STEPS), encoding="utf-8")
    (folder / "measured.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    draw_curves(folder / "loss.png", [progress])
