"""Chats that a target writes itself.

Every slot of a batch runs one chat: a user turn drawn from the model, often behind given first words, the markers between the turns, an
answer at temperature 0 or 1. A slot whose chat ends starts the next one at once, behind the system prompt that its KV cache still holds; so
no row of a batch is padding.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedTokenizerBase

USER_TOP_P = 0.95
USER_CANDIDATES = 256  # the nucleus is looked for among so many likeliest tokens
MAX_USER_TOKENS = 100
MIN_USER_TOKENS = 4
ALIGNED = 16  # positions: fast attention on GPUs wants masks of such lengths
OPENING_SIZES = (1, 2, 3, 5)  # tokens of a prompt that the target goes on from with a turn of its own
# An instruct model that is left free writes long, elaborate user turns; people's are short and plain, and mostly begin like these.
OPENING_SHARE = 0.6
OPENINGS = """\
What is|What are|What is the difference between|What are some|What are three|What would|What should I|How do I|
How can I|How does|How do|How to|Why do|Why is|When did|Who was|Who is|Where is|Which|Can you|
Could you explain|Do you|Is it|I want to|I need|I have|I'm|My|Help me|Please|Tell me about|Tell me a|
Give me|Give|Name three|List|List five|List the|Explain|Explain how|Explain the|Describe|Describe how|
Summarise|Summarize the|Write a|Write a short|Write an email|Write a Python function|Write a story|Write a poem|
Write a letter|Translate|Rewrite|Compare|Suggest|Create a|Make a|Plan a|Solve|Calculate|Convert|Define|
Discuss|In one sentence,|In a few words,|Imagine|Step by step,|Hello|Hi,|The""".replace("\n", "").split("|")


@dataclass(slots=True)
class Chat:
    """Token ids `[n]`, and the positions where the user's text and the answer start."""

    ids: torch.Tensor
    user_start: int
    answer_start: int
    temperature: float


@dataclass(slots=True)
class _Slot:
    ids: list[int]
    position: int  # of the token that runs next
    user_start: int
    answer_start: int  # 0 while the user's turn is drawn
    temperature: float


class _SlotCache:
    """Keys and values of every slot at fixed addresses, written in place (a DynamicCache copies all of them at each token)."""

    def __init__(self, config: Any, num_slots: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (num_slots, config.num_key_value_heads, length, head_dim)
        self._layers = [
            (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
            for _ in range(config.num_hidden_layers)
        ]
        self._rows = torch.arange(num_slots, device=device)
        self.positions = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.length = 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token's keys and values `[slots, heads, 1, dim]` of a layer; returns all of that layer."""
        stored_keys, stored_values = self._layers[layer]
        stored_keys[self._rows, :, self.positions] = keys[:, :, 0]
        stored_values[self._rows, :, self.positions] = values[:, :, 0]
        return stored_keys[:, :, : self.length], stored_values[:, :, : self.length]

    def get_seq_length(self, *_: Any) -> int:
        """The length that transformers asks for; positions are given explicitly."""
        return self.length


def _grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one token a slot; the query heads of a KV head are its queries, so keys are read once and never repeated."""
    batch, heads, _one, dim = query.shape
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    mixed = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(batch, 1, heads, dim), None


def _draw_user(logits: torch.Tensor) -> torch.Tensor:
    values, tokens = logits.topk(min(USER_CANDIDATES, logits.shape[-1]), dim=-1)
    p = values.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p > USER_TOP_P, 0.0)
    return tokens.gather(-1, torch.multinomial(p, 1))[:, 0]


def _draw(logits: torch.Tensor) -> torch.Tensor:
    """Inverse transform: one uniform number a row (multinomial draws one for every token of the vocabulary)."""
    total = logits.double().softmax(-1).cumsum(-1)
    u = torch.rand(len(logits), 1, dtype=total.dtype, device=total.device) * total[:, -1:]
    return torch.searchsorted(total, u)[:, 0].clamp(max=logits.shape[-1] - 1)


class ChatSampler:
    """Chats of a target: answers to `prompts` at both temperatures; then, or without prompts, endless chats whose user turns the target
    writes too, with `answers_only` none. The turns that it writes behind prompts begin like these. max_answer: tokens of an answer.
    answered: chats of an earlier run, whose prompts are not answered again.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_slots: int,
        seed: int,
        prompts: list[str] | None = None,
        answers_only: bool = False,
        max_answer: int = 300,
        answered: Iterable[Chat] = (),
    ) -> None:
        AttentionInterface.register("rootward_slots", _grouped_attention)
        model.config._attn_implementation = "rootward_slots"
        torch.manual_seed(seed)
        self._model = model
        self._random = random.Random(seed)
        self._max_answer = max_answer
        self._tokenizer = tokenizer
        self._prefix, self._suffix = turn_markers(tokenizer)
        openings = [tokenizer(words, add_special_tokens=False).input_ids for words in OPENINGS]
        ends = model.generation_config.eos_token_id
        self._stops = set(ends) if isinstance(ends, list) else {ends}
        texts = [tokenizer(text, add_special_tokens=False).input_ids[:MAX_USER_TOKENS] for text in prompts or ()]
        of_prompts = [text[:size] for text in texts for size in OPENING_SIZES if size < len(text)]
        self._openings = [openings, of_prompts or openings]  # each kind equally often
        done = Counter((*self._user_turn(chat), chat.temperature) for chat in answered)
        self._given = []
        for text, temperature in ((text, temperature) for text in texts for temperature in (0.0, 1.0)):
            key = (*text, temperature)
            if done[key]:  # a prompt may be given several times
                done[key] -= 1
            else:
                self._given.append((text, temperature))
        self._num_taken, self._answers_only = 0, answers_only
        self._max_length = (
            -(-(len(self._prefix) + MAX_USER_TOKENS + len(self._suffix) + max_answer + 1) // ALIGNED) * ALIGNED
        )
        parameter = next(model.parameters())
        self._cache = _SlotCache(model.config, num_slots, self._max_length, parameter.device, parameter.dtype)
        self._slots: list[_Slot | None] = [self._begin(position=0) for _ in range(num_slots)]

    def _user_turn(self, chat: Chat) -> list[int]:
        """Token ids of the user's text."""
        turn: list[int] = chat.ids[chat.user_start : chat.answer_start - len(self._suffix)].tolist()
        return turn

    @property
    def progress(self) -> float:
        """The share of the given prompts that are answered."""
        running = sum(slot is not None for slot in self._slots)
        return (self._num_taken - running) / len(self._given) if self._given else 0.0

    @torch.inference_mode()
    def chats(self) -> Iterator[list[Chat]]:
        """The chats that ended at each token step, often none; for ever, or until all prompts are answered."""
        device = self._cache.positions.device
        while any(self._slots):
            positions = torch.tensor([slot.position if slot else 0 for slot in self._slots], device=device)
            tokens = torch.tensor([slot.ids[slot.position] if slot else 0 for slot in self._slots], device=device)
            self._cache.positions = positions
            longest = max(slot.position for slot in self._slots if slot) + 1
            self._cache.length = -(-longest // ALIGNED) * ALIGNED
            mask = torch.arange(self._cache.length, device=device)[None] <= positions[:, None]
            output = self._model.model(
                tokens[:, None],
                attention_mask=mask[:, None, None],
                position_ids=positions[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )
            yield self._advance(output.last_hidden_state[:, 0])

    def _advance(self, last: torch.Tensor) -> list[Chat]:
        drawing = {i: slot for i, slot in enumerate(self._slots) if slot and slot.position + 1 == len(slot.ids)}
        users = [i for i, slot in drawing.items() if not slot.answer_start]
        warm = [i for i, slot in drawing.items() if slot.answer_start and slot.temperature > 0]
        greedy = [i for i, slot in drawing.items() if slot.answer_start and slot.temperature == 0]
        for rows, draw in ((users, _draw_user), (warm, _draw), (greedy, lambda logits: logits.argmax(-1))):
            if rows:
                for i, token in zip(rows, draw(self._model.lm_head(last[rows]).float()).tolist(), strict=True):
                    drawing[i].ids.append(token)
        for slot in self._slots:
            if slot:
                slot.position += 1
        ended = []
        for i, slot in drawing.items():
            if slot.answer_start:
                if slot.ids[-1] in self._stops or len(slot.ids) - slot.answer_start >= self._max_answer:
                    ended.append(_chat(slot))
                    self._slots[i] = self._begin(position=len(self._prefix) - 1)
            elif slot.ids[-1] == self._suffix[0]:
                slot.ids += self._suffix[1:]
                slot.answer_start = len(slot.ids)
                if slot.answer_start < slot.user_start + MIN_USER_TOKENS + len(self._suffix):
                    self._slots[i] = self._begin(position=len(self._prefix) - 1)
            elif len(slot.ids) - slot.user_start > MAX_USER_TOKENS:
                self._slots[i] = self._begin(position=len(self._prefix) - 1)
        return ended

    def _begin(self, *, position: int) -> _Slot | None:
        """A new chat of a slot that has run `position` tokens of the text before the user's; None when no more are wanted."""
        user_start = len(self._prefix)
        if self._num_taken == len(self._given):
            if self._answers_only:
                return None
            temperature = float(self._random.random() < 0.5)
            opening = (
                self._random.choice(self._random.choice(self._openings))
                if self._random.random() < OPENING_SHARE
                else []
            )
            return _Slot(
                [*self._prefix, *opening],
                position=position,
                user_start=user_start,
                answer_start=0,
                temperature=temperature,
            )
        text, temperature = self._given[self._num_taken]
        self._num_taken += 1
        ids = [*self._prefix, *text, *self._suffix]
        return _Slot(ids, position=position, user_start=user_start, answer_start=len(ids), temperature=temperature)


def _chat(slot: _Slot) -> Chat:
    ids = torch.tensor(slot.ids[: slot.position], dtype=torch.int32)  # the last token was not run
    return Chat(ids, slot.user_start, slot.answer_start, slot.temperature)


def turn_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids before the user's text, and those between it and the answer."""
    probe = "\u2402"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": probe}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(probe)
    return tuple(tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))  # type: ignore[return-value]
