"""Running models: KV trees over cache cells, batched tree forwards, laws from logits. Needs torch; knows nothing of the network."""
