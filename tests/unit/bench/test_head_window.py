"""`benchmarks.head_window`: what a head sees changes its acceptance, and a window as long as the text changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.heads import eagle3
from unit.engine import networks

from benchmarks.head_window import acceptance, answered, table
from rootward.engine.heads import load_head
from rootward.engine.model import HuggingFaceModel

PROMPT, NUM_TOKENS = [5, 9, 2, 31, 17, 8, 40, 3], 12


@pytest.mark.parametrize("greedy", [True, False])
def test_a_window_beyond_the_text_is_none_and_a_short_one_is_not(tmp_path: Path, greedy: bool) -> None:
    network = networks.tiny("LlamaConfig", num_hidden_layers=6)
    model = HuggingFaceModel(network, name="target", max_slots=1, max_len=64)
    head = load_head(str(eagle3(tmp_path, network, draft_ids=None, scale=1.0)), model.network)
    model.expose(head.states)
    answer = answered(model, PROMPT, NUM_TOKENS, greedy=greedy, seed=1)
    assert len(answer.tokens) == len(PROMPT) + NUM_TOKENS
    assert answer.states.shape[0] == len(answer.tokens) - 1
    again = (
        networks.tiny("LlamaConfig", num_hidden_layers=6)(torch.tensor([answer.tokens]))
        .logits[0, len(PROMPT) : -1]
        .softmax(-1)
    )
    torch.testing.assert_close(answer.target, again, atol=1e-5, rtol=1e-3)
    found = {w: acceptance(model, head, answer, window=w, greedy=False) for w in (1, len(answer.tokens), None)}
    assert found[len(answer.tokens)] == found[None]
    assert found[1] != found[None]
    assert all(0 < value < 1 for value in found.values())


def test_the_table_has_a_column_for_each_temperature_and_window() -> None:
    rows = [
        {"prompt_tokens": 60, "temperature": t, "window": w, "acceptance": t / 4 + (w or 0) / 1000}
        for t in (0.0, 1.0)
        for w in (None, 32)
    ]
    lines = table({"rows": rows}).splitlines()
    assert lines[0] == "| prompt, tokens | T = 0, 32 | T = 0, all | T = 1, 32 | T = 1, all |"
    assert lines[2] == "| 60 | 0.03 | 0.00 | 0.28 | 0.25 |"
