"""What a phase of the training shows."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("tqdm")

from training.progress import Progress


def shown(monkeypatch: pytest.MonkeyPatch, loss: float | None) -> tuple[str, Progress]:
    """What is written in 40 steps."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    progress = Progress("text")
    for step in range(40):
        progress.step(step / 40, loss)
    progress.close()
    return written.getvalue(), progress


def test_a_phase_without_training_shows_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    text, progress = shown(monkeypatch, None)
    assert "text" in text
    assert "loss" not in text
    assert not progress.training


def test_a_phase_with_training_shows_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    text, progress = shown(monkeypatch, 2.5)
    assert "loss 2.500 held-out -" in text
    assert progress.training == [(20, 2.5), (40, 2.5)]
