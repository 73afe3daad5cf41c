"""Running models: KV trees over cache cells, batched tree forwards, laws from logits. Needs torch; knows nothing of the network."""

import os

# Threads of OpenMP spin for about a millisecond after their work, not for ten or more: long enough from one layer to the next, and other
# processes, as a drafter beside its target, get the cores. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
