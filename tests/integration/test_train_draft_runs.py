"""`rootward train-draft` from text to a head that loads, on the target of the demo pair; a second run goes on where the first stopped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rootward import demo
from training.chat_store import ChatStore

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

FLAGS = "--tokens 3000 --slots 16 --batch-tokens 1000 --draft-vocabulary 512 --unrolled 2 --device cpu --threads 1 --answer-tokens 60"


def train(folder: Path, epochs: float, *more: str) -> dict[str, float]:
    command = [sys.executable, "-m", "rootward.cli", "train-draft", str(demo.paths().target), "--out", str(folder)]
    done = subprocess.run(
        [*command, *FLAGS.split(), "--epochs", str(epochs), *more],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(demo.__file__).parents[2],
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "measured.json").read_text(encoding="utf-8"))


def load_config(folder: Path) -> dict[str, int]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_a_head_is_trained_continued_and_written_as_published(tmp_path):
    first = train(tmp_path, 1)
    text = {path: path.stat().st_mtime_ns for path in (tmp_path / "work" / "text").iterdir()}
    second = train(tmp_path, 3)
    assert second["steps"] == 3 * first["steps"]
    assert second["visited_tokens"] > first["visited_tokens"]
    assert text == {path: path.stat().st_mtime_ns for path in (tmp_path / "work" / "text").iterdir()}
    assert second["prompts"][1]["accepted"][0] > 0.2, "least squares alone reach this"
    chats = ChatStore(tmp_path / "work" / "text")
    assert max(len(chats.answer_ids(chat)) for chat in range(len(chats))) <= 60
    tensors = load_file(tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    assert tensors["fc.weight"].shape == (config["hidden_size"], 3 * config["hidden_size"])
    ids = tensors["d2t"] + torch.arange(512)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    for part in ("text", "prompts"):
        shutil.copytree(tmp_path / "work" / part, tmp_path / "next" / "work" / part)
    third = train(tmp_path / "next", 0.2, "--from-head", str(tmp_path), "--tv", "2", "--tokens", "4000")
    assert third["steps"] < first["steps"]
    assert len(ChatStore(tmp_path / "next" / "work" / "text")) > len(chats), "more tokens add text"
    accepted = [sum(row["accepted"][0] for row in run["prompts"]) for run in (second, third)]
    assert accepted[1] > accepted[0] - 0.05, "goes on from that head, not from least squares"
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert "chain of 4" in (tmp_path / "README.md").read_text(encoding="utf-8")
