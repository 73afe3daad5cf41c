"""What the engine loop may do, as values."""

from __future__ import annotations

from dataclasses import dataclass

from rootward.core.requests import DraftMode


@dataclass(frozen=True, slots=True)
class Policy:
    """What the loop may do. Times in seconds, sizes in rows or tokens."""

    law: DraftMode = DraftMode.SAMPLED
    num_draft_tokens: int = 16
    max_depth: int = 8
    topk: int = 4
    local_draft: str = "none"  # what trees are looked up in while no drafter grows one
    num_ahead_tokens: int = 0  # nodes a drafter may grow beyond those that a round verifies
    law_atoms: int = 32
    draft_wait_s: float = 0.2
    zone: str = ""  # where it runs: drafters near by are tried first
    draft_prior_row_s: float = 0.0  # row-seconds of drafting per round until drafters report; 0: unknown
    max_rows: int = 256
    prefill_chunk: int = 256
    max_queued: int = 256

    @property
    def prefill_floor(self) -> int:
        """Rows of a step that rounds leave to prefill while there is any: new requests start, whatever the load."""
        return max(1, self.max_rows // 8)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the trees that drafters are asked for: atoms of a row, nodes, depth, children of a node, nodes grown ahead."""
        return self.law_atoms, self.num_draft_tokens, self.max_depth, self.topk, self.num_ahead_tokens
