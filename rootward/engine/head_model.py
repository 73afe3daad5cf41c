"""A draft head behind `ports.LanguageModel`: rows of text carry features of the target, drafted rows the head's own output above them.

So whatever grows trees from a draft model grows them from a head. The text of a slot may begin anywhere in the session's: positions are
relative. Committed rows are always read with features (`Rows.features`), so nothing that was drafted is kept for the next round.

Legend: N rows, T wanted rows, E hidden size of the head, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rootward.engine.batch import Step
from rootward.engine.block_head import BlockHead
from rootward.engine.block_head_model import BlockHeadModel
from rootward.engine.checkpoint import read_ends
from rootward.engine.heads import Head, load_head
from rootward.engine.kv_cache import PagedCache
from rootward.engine.model import DEFAULT_MAX_LEN, HuggingFaceModel, context_of, eos_ids
from rootward.engine.slots import Entry, Size, Slots, kept_rows
from rootward.engine.tokenizers import content_hash, find_tokenizer
from rootward.errors import ConfigurationError
from rootward.ports import COMMITTED, LanguageModel, ModelInfo, Reduction, Rows

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

BLOCK_SIZE = 16
TREE_ROOM = 256  # cells of a slot beyond its context


class DraftHead(LanguageModel, Protocol):
    """A language model whose rows of text need features of the target.

    reads         hidden states of the target that features are made of (`LanguageModel.expose`)
    feature_size  numbers of a feature
    """

    @property
    def reads(self) -> tuple[int, ...]: ...

    @property
    def feature_size(self) -> int: ...

    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        """float32[N, feature_size]: features by these states."""


class HeadModel:
    """Implements `DraftHead` for a network. `target`: what the target is, whose tokenizer and end-of-text tokens are the head's."""

    def __init__(self, head: Head, target: ModelInfo, *, name: str, max_slots: int = 8, fingerprint: str = ""):
        self.head = head
        size = Size.of(max_slots, target.max_positions, TREE_ROOM, BLOCK_SIZE, None)
        self._slots = Slots(size, target.vocab_size, f"{target.fingerprint}/{name}")
        self._kv = PagedCache(size, [None])
        self._passed_on: list[dict[int, torch.Tensor]] = [
            {} for _ in range(max_slots)
        ]  # by node: features for its children
        self._info = replace(target, name=name, fingerprint=fingerprint or name)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def reads(self) -> tuple[int, ...]:
        return self.head.states

    @property
    def feature_size(self) -> int:
        size: int = self.head.hidden_size
        return size

    @torch.inference_mode()
    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(states_NS)

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return self._slots.size.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._slots.pool.num_available

    @property
    def evicted_age_s(self) -> float:
        return self._slots.pool.evicted_age_s

    def blocks_needed(self, slot: int, num_rows: int) -> int:
        return self._slots.blocks_needed(slot, num_rows)

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        """Nothing is shared: what a head keeps of a text depends on where its features began."""
        slot = self._slots.open()
        self._passed_on[slot] = {}
        return slot

    def close(self, slot: int) -> None:
        self._slots.close(slot)
        self._passed_on[slot] = {}

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Logits [T, V], -inf outside the draft vocabulary; or what a reduction makes of them."""
        kept = kept_rows(batch, num_logits)
        head, device = self.head, self.head.device
        with self._slots.placed(batch) as entries:
            step = Step(entries, kept, self._slots.size, device, pad=not head.has_kernels)
            logits, passed_on = head(step, self._kv.layers[0], self._features(entries, step))
        rows = passed_on.unbind(0)
        width = 0 if head.has_kernels else step.width
        at = 0
        for b, (entry, keep) in enumerate(zip(entries, kept, strict=True)):
            first = b * width if width else at
            own = self._passed_on[entry.rows.slot]
            for i in keep:
                own[int(entry.rows.node[i])] = rows[first + i]
            at += entry.plan.num_rows
        return head.output.in_target_ids(logits, reduction)

    def _features(self, entries: Sequence[Entry], step: Step) -> torch.Tensor:
        """float32[N, E]."""
        head = self.head
        padded = not head.has_kernels
        parts: list[torch.Tensor] = []
        for entry in entries:
            rows, known = entry.rows, self._passed_on[entry.rows.slot]
            if rows.features is not None:
                own = torch.from_numpy(rows.features).to(head.device)
            else:
                own = torch.stack([known[parent] for parent in rows.parent.tolist()])
            if padded and len(own) < step.width:
                own = torch.cat([own, own[:1].expand(step.width - len(own), -1)])
            parts.append(own)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        self._kv.move(self._slots.commit(slot, node, keep_below=keep_below), self.head.device)
        own = self._passed_on[slot]
        if node in own:
            own[COMMITTED] = own.pop(node)
        self._forget(slot)

    def release(self, slot: int, keep: Collection[int] = ()) -> None:
        self._slots.release(slot, keep)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        """Of nodes that are held no longer."""
        tree, own = self._slots[slot], self._passed_on[slot]
        self._passed_on[slot] = {node: row for node, row in own.items() if node == COMMITTED or node in tree}

    def expose(self, states: Sequence[int]) -> None:
        """A head has no head."""

    @property
    def states(self) -> torch.Tensor:
        raise RuntimeError("states: a draft head exposes none")

    def check_idle(self) -> None:
        self._slots.check()


def model_of(
    head: Head | BlockHead, target: ModelInfo, *, name: str, max_slots: int = 8, fingerprint: str = ""
) -> DraftHead:
    """A head as a draft model. fingerprint: of its files; "": the name."""
    kind: Any = BlockHeadModel if isinstance(head, BlockHead) else HeadModel
    model: DraftHead = kind(head, target, name=name, max_slots=max_slots, fingerprint=fingerprint)
    return model


def load_head_model(path: str, model: HuggingFaceModel, *, max_slots: int) -> DraftHead:
    """The head in this folder for a target, with the reading of its layer ids (inputs of layers, or outputs) that drafts better.

    ConfigurationError: it is no head that fits (`heads.load_head`), or what it drafts is hardly ever what the target says."""
    head = load_head(path, model.network)
    tokenizer = model.tokenizer
    text = list(range(64)) if tokenizer is None else tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    text = [token for token in text if token < model.info.vocab_size][: model.info.max_positions]
    accepted = {}
    for states in head.readings:
        head.states = states
        accepted[states] = acceptance(head, model, text)
        log.info("%s: acceptance %.2f on %d tokens with states %s", path, accepted[states], len(text), states)
    head.states = max(accepted, key=accepted.__getitem__)
    if accepted[head.states] < LEAST_ACCEPTANCE:
        raise ConfigurationError(
            f"head: {path}: acceptance {accepted[head.states]:.2f} on a probe text, below {LEAST_ACCEPTANCE}; "
            "it was made for another target"
        )
    return model_of(head, model.info, name=path, max_slots=max_slots, fingerprint=fingerprint(path))


def load_head_apart(
    path: str, target: str, *, device: str = "cpu", dtype: str = "auto", max_slots: int, max_len: int | None = None
) -> DraftHead:
    """The head in this folder where its target is not loaded. target: folder or hub name, of which the embedding, the output matrix and
    the tokenizer are read. Which hidden states features are made of is settled where they are fused.

    ConfigurationError: it is no head that fits (`heads.load_head`), or the target cannot be read."""
    network = read_ends(target, device=device, dtype=dtype)
    head = load_head(path, network)
    tokenizer = find_tokenizer(target)
    longest = max_len or DEFAULT_MAX_LEN
    info = ModelInfo(
        name=target,
        vocab_size=len(network.get_input_embeddings().weight),
        max_positions=min(context_of(network.config.get_text_config()) or longest, longest),
        eos_ids=eos_ids(network),
        tokenizer_hash="" if tokenizer is None else content_hash(tokenizer),
    )
    model = model_of(head, info, name=path, max_slots=max_slots, fingerprint=fingerprint(path))
    _warm_up(model)
    return model


def _warm_up(model: DraftHead) -> None:
    """A forward of a row of text and of a drafted one: kernels are compiled before the first round waits for them."""
    slot = model.open()
    model.forward([Rows.chain(slot, 0, [0], np.zeros((1, model.feature_size), np.float32))])
    model.commit(slot, 0, keep_below=False)
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
            draft = probe.forward([chunk]).softmax(-1)
            probe.commit(own, int(chunk.node[-1]), keep_below=False)
            accepted += float(torch.minimum(target[rows], draft).sum())
        return accepted / len(features)
    finally:
        model.release(slot)
        model.close(slot)
        model.expose(())
