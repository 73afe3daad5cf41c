"""Running models: KV trees over cache cells, batched tree forwards, laws from logits. Needs torch; knows nothing of the network."""

import os

# torch asks the system for huge pages from 2 MiB on. Weights are read whole in every step, and a walk through pages of 4 KiB takes a tenth
# of it (docs/log.md). Looked at when torch allocates for the first time; 0 turns it off.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
