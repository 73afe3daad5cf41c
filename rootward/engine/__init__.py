"""Running models: KV trees over cache cells, batched tree forwards, laws from logits. Needs torch; knows nothing of the network."""

from rootward.host import let_idle_threads_sleep

let_idle_threads_sleep()  # before torch is loaded
