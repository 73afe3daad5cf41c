"""From the folder of a draft head to a draft model: beside its target, with the load probe, or apart from it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rootward.core.requests import MAX_LEVELS
from rootward.engine.block_head import BlockHead
from rootward.engine.block_head_model import BlockHeadModel
from rootward.engine.checkpoint import read_ends
from rootward.engine.head_model import DraftHead, HeadModel
from rootward.engine.heads import Head, load_head
from rootward.engine.model import HuggingFaceModel, describe
from rootward.engine.tokenizers import find_tokenizer
from rootward.errors import ConfigurationError
from rootward.ports import ModelInfo, Rows

log = logging.getLogger(__name__)

LEAST_ACCEPTANCE = 0.05  # of the load probe: below, the head belongs to another target
PROBE_TEXT = """\
Bread is made from flour, water, salt and yeast. The yeast eats the sugar in the flour and gives off gas, which makes the dough rise.
After an hour in a warm place the dough is about twice as large as before. It is then shaped, left to rise once more, and baked in a
hot oven until the crust is brown. Let it cool on a rack before you cut it, because the inside is still setting.

Question: What is the capital of France, and why is it famous?
Answer: The capital of France is Paris. It is famous for its museums, its food and the Eiffel Tower, which was built in 1889.
"""

PROBE_ROWS = 16  # at a time: a block head answers each with a block of distributions


def model_of(
    head: Head | BlockHead, target: ModelInfo, *, name: str, max_slots: int = 8, fingerprint: str = ""
) -> DraftHead:
    """A head as a draft model. fingerprint: of its files; "": the name."""
    kind: type[DraftHead] = BlockHeadModel if isinstance(head, BlockHead) else HeadModel
    return kind(head, target, name=name, max_slots=max_slots, fingerprint=fingerprint)


def load_head_model(path: str, model: HuggingFaceModel, *, max_slots: int, max_depth: int = MAX_LEVELS) -> DraftHead:
    """The head in this folder for a target, with the reading of its layer ids (inputs of layers, or outputs) that drafts better.
    max_depth: of the trees that it grows.

    ConfigurationError: it is no head that fits (`heads.load_head`), or what it drafts is hardly ever what the target says."""
    head = load_head(path, model.network)
    text = _probe_text(model)
    if isinstance(head, BlockHead):
        head.depth = 1  # what acceptance looks at
    accepted = {}
    for states in head.readings:
        head.states = states
        accepted[states] = acceptance(head, model, text)
        log.info("%s: acceptance %.2f on %d tokens with states %s", path, accepted[states], len(text), states)
    head.states = max(accepted, key=accepted.__getitem__)
    if not accepted[head.states] >= LEAST_ACCEPTANCE:  # NaN is not
        raise ConfigurationError(
            f"head: {path}: acceptance {accepted[head.states]:.2f} on a probe text, below {LEAST_ACCEPTANCE}; "
            "it was made for another target"
        )
    if isinstance(head, BlockHead):
        head.depth = min(head.block_size - 1, max_depth)
    return model_of(head, model.info, name=path, max_slots=max_slots, fingerprint=fingerprint(path))


def load_head_apart(
    path: str, target: str, *, device: str = "cpu", dtype: str = "auto", max_slots: int, max_len: int | None = None
) -> DraftHead:
    """The head in this folder where its target is not loaded. target: folder or hub name, of which the embedding, the output matrix and
    the tokenizer are read. Which hidden states features are made of is settled where they are fused.

    ConfigurationError: it is no head that fits (`heads.load_head`), or the target cannot be read."""
    network = read_ends(target, device=device, dtype=dtype)
    head = load_head(path, network)
    info = describe(network, target, find_tokenizer(target), max_len)
    model = model_of(head, info, name=path, max_slots=max_slots, fingerprint=fingerprint(path))
    _warm_up(model)
    return model


def _probe_text(model: HuggingFaceModel) -> list[int]:
    """PROBE_TEXT in tokens; without a tokenizer, or with one that knows none of its words, the lowest ids."""
    tokenizer, info = model.tokenizer, model.info
    text = [] if tokenizer is None else tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    known = [token for token in text if token < info.vocab_size]
    return (known if len(known) > 1 else list(range(min(64, info.vocab_size))))[: info.max_positions]


def _warm_up(model: DraftHead) -> None:
    """A forward of a row of text, and of a drafted one if there are such: kernels are compiled before the first round waits for them."""
    slot = model.open()
    model.forward([Rows.chain(slot, 0, [0], np.zeros((1, model.feature_size), np.float32))])
    model.commit(slot, 0, keep_below=False)
    if not model.num_marginals:
        model.forward([Rows.chain(slot, 1, [0])])
        model.release(slot)
    model.close(slot)


def fingerprint(path: str) -> str:
    """sha256 over the configuration and the weights of the head in this folder: equal files fuse equal features."""
    digest = hashlib.sha256()
    folder = Path(path).expanduser()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


@torch.inference_mode()
def acceptance(head: Head | BlockHead, model: HuggingFaceModel, text: Sequence[int]) -> float:
    """Probability that a token which the head draws after a prefix of this text is accepted, mean over prefixes: sum of min(p, q)."""
    model.expose(head.states)
    slot = model.open()
    probe = model_of(head, model.info, name="probe", max_slots=1)
    own = probe.open()
    try:
        target = model.forward([Rows.chain(slot, 0, text)])[1:].softmax(-1)
        features = probe.fuse(model.states)[:-1].float().cpu().numpy()
        accepted = 0.0
        for start in range(0, len(features), PROBE_ROWS):
            rows = slice(start, start + PROBE_ROWS)
            chunk = Rows.chain(own, start, text[1:][rows], features[rows])
            draft = probe.forward([chunk])[:: max(1, probe.num_marginals)].softmax(-1)
            probe.commit(own, int(chunk.node[-1]), keep_below=False)
            accepted += float(torch.minimum(target[rows], draft).sum())
        return accepted / len(features)
    finally:
        model.release(slot)
        model.close(slot)
        model.expose(())
