"""The model card, the numbers behind it, the loss curve and the licence notice."""

import json
from pathlib import Path
from typing import Any

from training.progress import Progress

LICENCE = """\
The models in this folder were trained on the source files of the Python standard library, and `prompts.jsonl` holds
short excerpts of them.

Copyright (c) 2001-2025 Python Software Foundation. All Rights Reserved.
Copyright (c) 2000 BeOpen.com. All Rights Reserved.
Copyright (c) 1995-2001 Corporation for National Research Initiatives. All Rights Reserved.
Copyright (c) 1991-1995 Stichting Mathematisch Centrum, Amsterdam. All Rights Reserved.

Python is distributed under the PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2, whose full text is at
https://docs.python.org/3/license.html and in the file LICENSE.txt of every Python distribution.
Changes: the excerpts are cut short at the end of a line; the field `source` names file and first line of each.
"""

CARD = """\
---
license: psf-2.0
language: [code]
library_name: transformers
tags: [python, speculative-decoding, tiny]
---
# The demo pair

Two tiny Llama models that continue Python source: `target/` and a `draft/` that imitates it. They exist so that
Rootward can be tried and tested without a GPU or a download. They are no coding assistants: the text looks like
Python and means little. In a chat, what the user says becomes a comment and the answer is code.

| | target | draft |
|---|---|---|
| parameters, tied embeddings included | {target_parameters:,} | {draft_parameters:,} |
| layers × hidden | {target_layers} × {target_hidden} | {draft_layers} × {draft_hidden} |
| held-out loss (nats a token) | {target_loss:.3f} | {draft_loss:.3f} |
| training steps of {step_tokens} tokens | {target_steps} | {draft_steps} |

Vocabulary {vocab} (byte-level BPE, {chars_per_token:.2f} characters a token on held-out text), context 1024 tokens,
weights bfloat16.

## Acceptance

Mean over positions of the sum over tokens of min(p, q), the chance that a single draft token is accepted; at
temperature 0 the share of positions where both models rank the same token first.

| temperature | held-out text | text the target drew from held-out prompts |
|---|---|---|
{acceptance_rows}

![held-out loss](loss.png)

## Data and licence

The Python {python} standard library without its tests and without generated tables: {num_training} files train,
{num_held_out} files ({held_out_percent} % by a hash of the path) are held out from models and tokenizer;
`prompts.jsonl` is cut from those. The library is © Python Software Foundation, used under the PSF License Version 2
(`LICENSE-PSF.txt`); weights and prompts are shared under the same terms. A model can repeat passages of its training
text.

## Training

`python -m training.train` makes everything in this folder. The target learns next-token prediction (AdamW, bfloat16
arithmetic, windows of 256, 512, then 1024 tokens); the draft learns KL(p ‖ q) + TV(p, q) to the target, on library text
and on {pool_rows:,} rows that the target drew at temperatures 0, 0.7 and 1. Data order and draws are seeded, but a phase
ends by the clock: the same command gives a pair of the same kind, not the same bits. `--steps-target` and
`--steps-draft` end a phase by steps instead. These files were made on two CPU cores that other work shared, in
{total_minutes:.0f} minutes, by

```
{command_lines}
```

The target is far from converged; more minutes on an idle machine would make it better, and then its draft has to learn anew.
The picture shows what the last command trained. All numbers above are in `measured.json`.
"""


def write(folder: Path, measured: dict[str, Any], curves: list[Progress]) -> None:
    """Write card, numbers, picture and notice into `folder`."""
    rows = zip(("0", "0.7", "1"), measured["acceptance_held_out"], measured["acceptance_own_text"], strict=True)
    table = "\n".join(f"| {t} | {a:.3f} | {b:.3f} |" for t, a, b in rows)
    commands = "\n".join(measured["commands"])
    (folder / "README.md").write_text(
        CARD.format(**measured, acceptance_rows=table, command_lines=commands), encoding="utf-8"
    )
    (folder / "measured.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    (folder / "LICENSE-PSF.txt").write_text(LICENCE, encoding="utf-8")
    if curves:
        draw_curves(folder / "loss.png", curves)


def draw_curves(path: Path, curves: list[Progress]) -> None:
    """Training and held-out loss of each phase, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 3.5), squeeze=False)
    for axis, curve in zip(axes[0], curves, strict=True):
        if curve.training:
            axis.plot(*zip(*curve.training, strict=True), lw=0.8, label="training")
        axis.plot(*zip(*curve.held_out, strict=True), "o-", ms=3, label="held-out, nats a token")
        axis.set(title=curve.name, xlabel="step", ylabel="loss")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
