"""A draft model with another tokenizer than the target's, whose inputs and outputs are token ids of the target.

Token-level intersection (TLI, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
2502.05202): the draft distribution is restricted to the tokens whose text is in both vocabularies, and renormalised. It is declared and
sampled like any other draft distribution, so losslessness does not depend on the map between the vocabularies; acceptance does.

A token of the text that the draft model does not have is read as the longest tokens that spell it. Text is mapped token by token, which may
differ from how the draft's tokenizer would divide it.

Legend: T wanted rows, V vocabulary of the target, V' of the draft, M shared tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rootward.engine.atoms import reduced
from rootward.engine.slots import kept_rows
from rootward.engine.tokenizers import content_hash, num_ids, token_texts
from rootward.errors import ConfigurationError
from rootward.ports import COMMITTED, DraftModel, Reduction, Rows

log = logging.getLogger(__name__)

# Of shared tokens: a row in which the draft gives probability to none of them becomes uniform, not undefined.
LOWEST_LOGIT = -1e30


class TokenMap:
    """The tokens of a target in those of a draft.

    target_ids, draft_ids  int64[M]: shared tokens, each id once; target_ids ascend
    """

    def __init__(
        self, target: Mapping[int, bytes], draft: Mapping[int, bytes], *, pairs: Iterable[tuple[int, int]] = ()
    ):
        """Texts by id. `pairs`: (target id, draft id) of tokens without text, such as the end of a text.

        ConfigurationError if no token is shared."""
        self._target, self._by_text = target, {text: i for i, text in sorted(draft.items(), reverse=True) if text}
        self._longest = max(map(len, self._by_text), default=0)
        shared = dict(pairs)
        taken = set(shared.values())
        for target_id, text in sorted(target.items()):
            draft_id = self._by_text.get(text)
            if draft_id is not None and draft_id not in taken and target_id not in shared:
                shared[target_id] = draft_id
                taken.add(draft_id)
        if not shared:
            raise ConfigurationError(
                "target_tokenizer: no token of it is in the draft's vocabulary; use another draft model"
            )
        both = np.array(sorted(shared.items()), dtype=np.int64)
        self.target_ids, self.draft_ids = both[:, 0].copy(), both[:, 1].copy()
        self._spelled: dict[int, tuple[int, ...]] = {int(t): (int(d),) for t, d in both}
        self._unknown = (int(self.draft_ids[0]),)  # stands for what cannot be spelled

    def spelled(self, token: int) -> tuple[int, ...]:
        """Draft ids that a token of the target is read as; at least one."""
        found = self._spelled.get(token)
        if found is None:
            found = self._spelled[token] = self._longest_tokens(self._target.get(token, b"")) or self._unknown
        return found

    def _longest_tokens(self, text: bytes) -> tuple[int, ...]:
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._by_text), None)
            if end is not None:
                found.append(self._by_text[text[at:end]])
            at = end if end is not None else at + 1
        return tuple(found)


def token_map(target: Any, draft: Any, *, num_draft_ids: int | None = None) -> TokenMap:
    """Of two tokenizers of transformers. Special tokens are shared if they are spelled alike; so are the ends of a text.

    num_draft_ids: tokens that the draft model has; its tokenizer may have more. None: as many as the tokenizer."""
    most = num_ids(draft) if num_draft_ids is None else num_draft_ids
    own = {i: text for i, text in token_texts(draft).items() if i < most}
    ends = [(target.eos_token_id, draft.eos_token_id)]
    has_ends = target.eos_token_id is not None and draft.eos_token_id in own
    return TokenMap(token_texts(target), own, pairs=ends if has_ends else [])


@dataclass(frozen=True, slots=True)
class _Node:
    parent: int
    ids: tuple[int, ...]  # nodes of the draft model, one below the other; the last one stands for it. () in a full slot


@dataclass(slots=True)
class _Slot:
    """State of a slot. skip: draft tokens of the next token of the text that are committed already. draft_length: committed draft tokens.
    is_full: the text is longer than the draft model's context; the slot gives uniform rows."""

    length: int = 0
    draft_length: int = 0
    skip: int = 0
    next_id: int = 0
    is_full: bool = False
    nodes: dict[int, _Node] = field(default_factory=dict)


class TranslatedModel:
    """Implements `ports.DraftModel` in the target's vocabulary. A slot whose text is too long for the draft model gives uniform rows."""

    def __init__(self, model: DraftModel, tokens: TokenMap, *, vocab_size: int, tokenizer_hash: str = ""):
        self.model, self._tokens = model, tokens
        self.info = replace(model.info, vocab_size=vocab_size, tokenizer_hash=tokenizer_hash, eos_ids=())
        self._slots: dict[int, _Slot] = {}
        self._target_ids, self._draft_ids = torch.from_numpy(tokens.target_ids), torch.from_numpy(tokens.draft_ids)

    @property
    def num_free_slots(self) -> int:
        return self.model.num_free_slots

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        spelled = [self._tokens.spelled(token) for token in tokens]
        slot = self.model.open([i for ids in spelled for i in ids], salt=salt)
        own = self._slots[slot] = _Slot(draft_length=self.model.length(slot))
        own.skip = own.draft_length
        for ids in spelled:
            if own.skip < len(ids):
                break
            own.skip -= len(ids)
            own.length += 1
        return slot

    def close(self, slot: int) -> None:
        self.model.close(slot)
        del self._slots[slot]

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Logits [T, V], -inf for tokens that are not shared; or what a reduction makes of them."""
        read: list[Rows] = []
        wanted: list[int] = []  # how many last rows of each
        at: list[int] = []  # of each wanted row its place among the wanted rows of the draft model; -1: of a full slot
        new: list[tuple[_Slot, dict[int, _Node]]] = []
        for rows, kept in zip(batch, kept_rows(batch, num_logits), strict=True):
            slot = self._slots[rows.slot]
            nodes, drafted = self._spelled(slot, rows)
            new.append((slot, nodes))
            if drafted is None:
                at += [-1] * len(kept)
                continue
            ends = np.cumsum([len(nodes[int(node)].ids) for node in rows.node]) - 1
            first = int(ends[kept[0]])
            at += [sum(wanted) + int(ends[row]) - first for row in kept]
            read.append(drafted)
            wanted.append(len(drafted.node) - first)
        logits = self.model.forward(read, num_logits=wanted) if read else torch.zeros(1, self.model.info.vocab_size)
        for slot, nodes in new:
            slot.nodes |= nodes
            slot.next_id += sum(len(node.ids) for node in nodes.values())
            slot.skip = 0
        return reduced(self._in_target_ids(logits, at), reduction)

    def _spelled(self, slot: _Slot, rows: Rows) -> tuple[dict[int, _Node], Rows | None]:
        """New nodes, and their rows for the draft model; None if it cannot read them."""
        spelled = [self._tokens.spelled(token) for token in rows.token.tolist()]
        if slot.skip:  # the rows are the text that the slot was opened with, from its first token that is not held
            spelled[0] = spelled[0][slot.skip :]
        held = slot.draft_length + sum(len(known.ids) for known in slot.nodes.values())
        if not slot.is_full and held + sum(map(len, spelled)) > self.model.info.max_positions:
            self.model.release(rows.slot)
            slot.is_full = True
            slot.nodes = {name: replace(known, ids=()) for name, known in slot.nodes.items()}
        names, parents = rows.node.tolist(), rows.parent.tolist()
        if slot.is_full:
            return {name: _Node(parent, ()) for name, parent in zip(names, parents, strict=True)}, None
        nodes: dict[int, _Node] = {}
        above, next_id = [], slot.next_id
        for name, parent, ids in zip(names, parents, spelled, strict=True):
            own = tuple(range(next_id, next_id + len(ids)))
            next_id += len(ids)
            first = COMMITTED if parent == COMMITTED else (nodes.get(parent) or slot.nodes[parent]).ids[-1]
            above += [first, *own[:-1]]
            nodes[name] = _Node(parent, own)
        node = [i for known in nodes.values() for i in known.ids]
        token = [i for ids in spelled for i in ids]
        return nodes, Rows(rows.slot, *np.array([node, above, token], dtype=np.int64))

    def _in_target_ids(self, logits: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
        """[T, V] of the draft model's [T', V'], by place; uniform where that is -1."""
        found = logits.new_full((len(at), self.info.vocab_size), -torch.inf)
        place = torch.tensor(at, device=logits.device)
        shared = logits.index_select(0, place.clamp(min=0)).index_select(1, self._draft_ids.to(logits.device))
        shared = shared.clamp(min=LOWEST_LOGIT).masked_fill(place[:, None] < 0, 0.0)
        return found.index_copy_(1, self._target_ids.to(logits.device), shared)

    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        own = self._slots[slot]
        path = [node]
        while (above := own.nodes[path[-1]].parent) != COMMITTED:
            path.append(above)
        if not own.is_full:
            self.model.commit(slot, own.nodes[node].ids[-1], keep_below=keep_below)
        own.length += len(path)
        own.draft_length += sum(len(own.nodes[name].ids) for name in path)
        below: dict[int, _Node] = {}
        for name, known in own.nodes.items() if keep_below else ():  # parents come first
            if known.parent == node:
                below[name] = replace(known, parent=COMMITTED)
            elif known.parent in below:
                below[name] = known
        own.nodes = below

    def release(self, slot: int, keep: Collection[int] = ()) -> None:
        own = self._slots[slot]
        own.nodes = {name: known for name, known in own.nodes.items() if name in keep}
        if not own.is_full:
            self.model.release(slot, {i for known in own.nodes.values() for i in known.ids})


def in_vocabulary_of(model: DraftModel, draft_tokenizer: Any, target_tokenizer: Any) -> DraftModel:
    """The model itself if the tokenizers are the same; otherwise the same model in the vocabulary of the target."""
    tokenizer_hash = content_hash(target_tokenizer)
    if tokenizer_hash == content_hash(draft_tokenizer):
        return model
    tokens = token_map(target_tokenizer, draft_tokenizer, num_draft_ids=model.info.vocab_size)
    size = num_ids(target_tokenizer)
    log.info(
        "%s: has %d of the %d tokens of the target; a token that it lacks is never drafted",
        model.info.name,
        len(tokens.target_ids),
        size,
    )
    return TranslatedModel(model, tokens, vocab_size=size, tokenizer_hash=tokenizer_hash)
