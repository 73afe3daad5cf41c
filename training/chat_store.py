"""Chats with hidden states on disk: chunks in safetensors that are memory-mapped, so that a training run may be larger than the memory."""

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
    """ids `[B, T]`, hidden states `[B, T, layers + 1, hidden]` in float32, `wanted` `[B, T]`: indices whose next position is trained on
    or measured.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    wanted: torch.Tensor


def write_chunk(path: Path, chats: list[Chat]) -> None:
    """Store chats as one file, complete or not at all."""
    partial = path.with_suffix(".new")
    tensors = {
        "ids": torch.cat([chat.ids for chat in chats]),
        "hidden": torch.cat([chat.hidden for chat in chats]).flatten(1),
        "ends": torch.tensor([len(chat.ids) for chat in chats]).cumsum(0),
        "user_start": torch.tensor([chat.user_start for chat in chats]),
        "answer_start": torch.tensor([chat.answer_start for chat in chats]),
        "temperature": torch.tensor([chat.temperature for chat in chats]),
    }
    save_file(tensors, partial)
    partial.replace(path)


class ChatStore:
    """All chunks of a folder as one list of chats."""

    def __init__(self, folder: Path, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._files = []
        self._names: list[str] = []
        self._chats: list[tuple[int, int, int]] = []  # file, first and last + 1 position
        self.temperatures: list[float] = []
        self._user_starts: list[int] = []
        self._answer_starts: list[int] = []
        self._ids: list[torch.Tensor] = []
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            ends = file.get_tensor("ends").tolist()
            self._chats += [(len(self._files), start, end) for start, end in zip([0, *ends], ends, strict=False)]
            self.temperatures += file.get_tensor("temperature").tolist()
            self._user_starts += file.get_tensor("user_start").tolist()
            self._answer_starts += file.get_tensor("answer_start").tolist()
            self._files.append(file)
            self._names.append(path.stem)
            self._ids.append(file.get_tensor("ids").long())

    def __len__(self) -> int:
        return len(self._chats)

    def key(self, chat: int) -> str:
        """File and place of a chat."""
        file, start, _ = self._chats[chat]
        return f"{self._names[file]}/{start}"

    @property
    def num_tokens(self) -> int:
        """Positions of all chats."""
        return sum(end - start for _, start, end in self._chats)

    def length(self, chat: int) -> int:
        """Positions of a chat."""
        _, start, end = self._chats[chat]
        return min(end - start, LONGEST)

    def answer_ids(self, chat: int) -> torch.Tensor:
        """Token ids of the answer."""
        file, start, end = self._chats[chat]
        return self._ids[file][start + self._answer_starts[chat] : end]

    def token_counts(self, chats: list[int], vocabulary: int) -> torch.Tensor:
        """How often each token occurs in answers."""
        return torch.bincount(torch.cat([self.answer_ids(chat) for chat in chats]), minlength=vocabulary)

    def batch(self, chats: list[int], *, users: bool) -> Batch:
        """These chats, padded to the longest of them. Wanted are the positions of answers and, with `users`, of the user's turns."""
        longest = max(self.length(chat) for chat in chats)
        ids = torch.zeros(len(chats), longest, dtype=torch.long)
        hidden: torch.Tensor | None = None
        wanted = torch.zeros(len(chats), longest, dtype=torch.bool)
        for row, chat in enumerate(chats):
            file, start, _ = self._chats[chat]
            n = self.length(chat)
            states = self._files[file].get_slice("hidden")[start : start + n]
            if hidden is None:
                hidden = torch.zeros(len(chats), longest, states.shape[1])
            ids[row, :n] = self._ids[file][start : start + n]
            hidden[row, :n] = states
            wanted[row, (self._user_starts if users else self._answer_starts)[chat] - 1 : n - 1] = True
        assert hidden is not None
        return Batch(ids, hidden.unflatten(-1, (-1, self._hidden_size)), wanted)

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
