"""What a drafter tells about itself outside a stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from rootward.core.frames import HelloAck, Load
from rootward.ports import ModelInfo


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """`ack` is what the drafter answers to a Hello that suits it; `load` is its heartbeat now."""

    model: ModelInfo
    ack: HelloAck
    load: Load = field(default_factory=Load)
