"""Chats on disk, a file for each chunk of them, and as one list."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from training.chats import Chat

LONGEST = 512


@dataclass(frozen=True, slots=True)
class Batch:
    """ids `[B, T]`, and `wanted` `[B, T]`: indices whose next position is trained on or measured."""

    ids: torch.Tensor
    wanted: torch.Tensor


def write_chunk(path: Path, chats: list[Chat]) -> None:
    """Store chats as one file, complete or not at all."""
    partial = path.with_suffix(".new")
    tensors = {
        "ids": torch.cat([chat.ids for chat in chats]),
        "ends": torch.tensor([len(chat.ids) for chat in chats]).cumsum(0),
        "user_start": torch.tensor([chat.user_start for chat in chats]),
        "answer_start": torch.tensor([chat.answer_start for chat in chats]),
        "temperature": torch.tensor([chat.temperature for chat in chats]),
    }
    save_file(tensors, partial)
    partial.replace(path)


class ChatStore:
    """All chunks of a folder as one list of chats."""

    def __init__(self, folder: Path) -> None:
        self._chats: list[Chat] = []
        self._keys: list[str] = []
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:  # files of earlier versions hold hidden states too
                ids = file.get_tensor("ids")
                columns = ("ends", "user_start", "answer_start", "temperature")
                ends, *facts = (file.get_tensor(name).tolist() for name in columns)
            starts = [0, *ends[:-1]]
            for start, end, user_start, answer_start, temperature in zip(starts, ends, *facts, strict=True):
                self._chats.append(Chat(ids[start:end], user_start, answer_start, temperature))
                self._keys.append(f"{path.stem}/{start}")

    def __len__(self) -> int:
        return len(self._chats)

    def key(self, chat: int) -> str:
        """File and place of a chat."""
        return self._keys[chat]

    def __iter__(self) -> Iterator[Chat]:
        return iter(self._chats)

    def temperature(self, chat: int) -> float:
        """That of the answer."""
        return self._chats[chat].temperature

    @property
    def num_tokens(self) -> int:
        """Positions of all chats."""
        return sum(len(chat.ids) for chat in self._chats)

    def length(self, chat: int) -> int:
        """Positions of a chat."""
        return min(len(self._chats[chat].ids), LONGEST)

    def answer_ids(self, chat: int) -> torch.Tensor:
        """Token ids of the answer."""
        return self._chats[chat].ids[self._chats[chat].answer_start :].long()

    def token_counts(self, chats: list[int], vocabulary: int) -> torch.Tensor:
        """How often each token occurs in answers."""
        return torch.bincount(torch.cat([self.answer_ids(chat) for chat in chats]), minlength=vocabulary)

    def batch(self, chats: list[int], *, users: bool) -> Batch:
        """These chats, padded to the longest of them. Wanted are the positions of answers and, with `users`, of the user's turns."""
        longest = max(self.length(chat) for chat in chats)
        ids = torch.zeros(len(chats), longest, dtype=torch.long)
        wanted = torch.zeros(len(chats), longest, dtype=torch.bool)
        for row, number in enumerate(chats):
            chat, n = self._chats[number], self.length(number)
            ids[row, :n] = chat.ids[:n]
            wanted[row, (chat.user_start if users else chat.answer_start) - 1 : n - 1] = True
        return Batch(ids, wanted)

    def batches(self, chats: list[int], tokens: int, generator: random.Random) -> Iterator[list[int]]:
        """One epoch: chats of similar length together, about `tokens` positions a batch, batches in random order."""
        order = sorted(chats, key=lambda chat: self.length(chat) + generator.random() * 16)
        groups: list[list[int]] = [[]]
        for chat in order:
            if groups[-1] and (len(groups[-1]) + 1) * self.length(chat) > tokens:
                groups.append([])
            groups[-1].append(chat)
        generator.shuffle(groups)
        yield from (group for group in groups if group)
