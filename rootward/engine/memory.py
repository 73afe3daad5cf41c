"""The memory plan of a model: what weights and KV blocks take, in one line, before the first request."""

from __future__ import annotations

from dataclasses import dataclass

from rootward.engine.slots import Size


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """In bytes. `bytes_per_token` of K and V in all layers, as the load probe saw them; 0 where no KV cache is kept."""

    weights: int
    bytes_per_token: int
    size: Size

    @property
    def kv(self) -> int:
        return self.bytes_per_token * self.size.storage

    def __str__(self) -> str:
        size = self.size
        weights = f"weights {_mib(self.weights)}"
        if not self.bytes_per_token:
            return f"memory plan: {weights}, no KV cache"
        whole = size.num_slots * size.num_cells
        return (
            f"memory plan: {weights}, KV cache {_mib(self.kv)} = {size.num_blocks} blocks of {size.block_size} tokens "
            f"of {self.bytes_per_token / 1024:.1f} KiB; {size.storage} tokens fit, {size.num_slots} sessions at their longest "
            f"take {whole}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
