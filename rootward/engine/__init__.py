"""Running models: KV trees over cache cells, batched tree forwards, laws from logits. Needs torch; knows nothing of the network."""

from rootward.host import shorten_spinning

shorten_spinning()  # before torch is loaded
