"""Messages of rank 0 to the other ranks of a model: JSON, validated by the receiver. Unlike pickles they cannot run code."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter

from rootward.engine.block_pool import BlockTable
from rootward.engine.kv_tree import Moves, Placement
from rootward.engine.probe import ProbeReport
from rootward.engine.slots import Entry
from rootward.ports import Rows


def _array(dtype: type) -> tuple[PlainValidator, PlainSerializer]:
    """An array of one dimension, as base64 of its bytes."""
    return (
        PlainValidator(lambda text: np.frombuffer(b64decode(text, validate=True), dtype)),
        PlainSerializer(lambda array: b64encode(np.asarray(array, dtype).tobytes()).decode("ascii")),
    )


Ints = Annotated[Any, *_array(np.int64)]
Bits = Annotated[Any, *_array(np.uint8)]


# Fields of a `kv_tree.Placement` that a message holds under their own names.
SENT_AS_THEY_ARE = ("num_rows", "length", "node", "token", "scratch", "position", "end", "version")


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class EntryMessage(Message):
    """One session's part of a forward (`slots.Entry`). `ancestors`: the bits of a matrix, packed."""

    slot: int
    parent: Ints
    num_rows: int
    length: int
    node: Ints
    token: Ints
    scratch: Ints
    position: Ints
    ancestors: Bits
    end: int
    version: int
    block_size: Annotated[int, Field(ge=1)]
    blocks: Ints

    @classmethod
    def of(cls, entry: Entry) -> Self:
        plan, table = entry.plan, entry.table
        if entry.rows.features is not None:
            raise ValueError("features are of draft heads, which run on one rank")
        return cls.model_construct(
            slot=entry.rows.slot,
            parent=entry.rows.parent,
            ancestors=np.packbits(plan.ancestors),
            block_size=table.block_size,
            blocks=table.blocks,
            **{name: getattr(plan, name) for name in SENT_AS_THEY_ARE},
        )

    def entry(self) -> Entry:
        num = len(self.node)
        ancestors = np.unpackbits(self.ancestors, count=num * num).astype(bool).reshape(num, num)
        plan = Placement(ancestors=ancestors, **{name: getattr(self, name) for name in SENT_AS_THEY_ARE})
        table = BlockTable(self.block_size, len(self.blocks))
        table.extend(self.blocks)
        new = slice(num - self.num_rows, num)
        return Entry(Rows(self.slot, self.node[new], self.parent, self.token[new]), plan, table)


class Run(Message):
    """Run a forward. `kept`: start and end of the rows of each entry whose logits are wanted."""

    do: Literal["run"] = "run"
    entries: list[EntryMessage]
    kept: list[tuple[int, int]]

    @classmethod
    def of(cls, entries: Sequence[Entry], kept: Sequence[range]) -> Self:
        parts = [EntryMessage.of(entry) for entry in entries]
        return cls.model_construct(entries=parts, kept=[(rows.start, rows.stop) for rows in kept])

    def arguments(self) -> tuple[list[Entry], list[range]]:
        return [part.entry() for part in self.entries], [range(*rows) for rows in self.kept]


class Move(Message):
    """Copy cells (`kv_tree.Moves`)."""

    do: Literal["move"] = "move"
    token: Ints
    source: Ints
    target: Ints

    @classmethod
    def of(cls, moves: Moves) -> Self:
        return cls.model_construct(token=moves.token, source=moves.source, target=moves.target)

    def arguments(self) -> tuple[Moves]:
        return (Moves(self.token, self.source, self.target),)


class Probed(Message):
    """Result of rank 0's load probe, which all ranks use."""

    do: Literal["probed"] = "probed"
    report: ProbeReport


class Done(Message):
    """There are no further steps."""

    do: Literal["done"] = "done"


AnyMessage = Run | Move | Probed | Done
_received: TypeAdapter[AnyMessage] = TypeAdapter(Annotated[AnyMessage, Field(discriminator="do")])


def encode(message: AnyMessage) -> bytes:
    return message.model_dump_json().encode()


def decode(data: bytes) -> AnyMessage:
    """The message. ValidationError (a ValueError) if it is invalid."""
    return _received.validate_json(data)
