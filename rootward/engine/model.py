"""A Hugging Face causal language model behind `ports.LanguageModel`.

Legend: T wanted rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rootward.engine import tree_attention
from rootward.engine.attention import layer_windows
from rootward.engine.checkpoint import fingerprint, num_bytes
from rootward.engine.graphs import Capture
from rootward.engine.layers import replace_linears
from rootward.engine.parallel import Group, LeadingPass, follow
from rootward.engine.passes import ForwardPass, PathPass, TreePass
from rootward.engine.probe import choose_attention, choose_llama
from rootward.engine.slots import MemoryPlan, Size, Slots, kept_rows
from rootward.engine.tokenizers import content_hash, num_ids
from rootward.errors import ConfigurationError
from rootward.ports import LosslessLevel, ModelInfo, Reduction, Rows

DEFAULT_MAX_LEN = 8192
BLOCK_SIZE = 16  # cells of a KV block


class HuggingFaceModel(Slots):
    """Batched forwards over KV trees; or, for a network that the load probe refuses, path by path without a cache.

    max_len          longest context, at most the network's own
    tree_room        KV cells of a slot beyond the context, for trees. Rows of nodes beyond the context are never used
    kv_cache_tokens  most tokens in the KV memory of all sessions together; None: all sessions at their longest
    fast             on a CPU, replace linear layers by those of `layers`, and run networks of the Llama family in few operations
    group            the ranks that share `network`. Rank 0 is used like any model; the others call `follow`
    adapter          folder of the adapter that has been merged into `network`
    capture          records steps (CUDA graphs)
    """

    def __init__(
        self,
        network: Any,
        *,
        name: str,
        tokenizer: Any = None,
        max_slots: int = 8,
        max_len: int | None = None,
        tree_room: int = 256,
        kv_cache_tokens: int | None = None,
        attn: str = "sdpa",
        fast: bool = True,
        group: Group | None = None,
        adapter: str | None = None,
        capture: Capture | None = None,
    ):
        self.network, self.tokenizer, self._group = network.eval().requires_grad_(False), tokenizer, group
        info = replace(
            describe(network, name, tokenizer, max_len),
            num_parameters=sum(p.numel() for p in network.parameters()),
            fingerprint=fingerprint(network, adapter),
        )
        # A network that has been served before reads the tensors of a step, which a sample does not have.
        is_new = network.config._attn_implementation not in tree_attention.NAMES
        if is_new and bool(_sample(network).isnan().any()):
            raise ConfigurationError(
                f"model: {name!r}: its logits are NaN; the weights are damaged, or too large for dtype {network.dtype}"
            )
        weights = num_bytes(network)
        fast = fast and group is None and replace_linears(network, lambda: _sample(network))
        try:
            size = Size.of(max_slots, info.max_positions, tree_room, BLOCK_SIZE, kv_cache_tokens)
        except ValueError as wrong:
            raise ConfigurationError(f"model: {name!r}: {wrong}") from wrong
        super().__init__(size, info.vocab_size, info.fingerprint)
        self._num_ids = info.vocab_size if tokenizer is None else num_ids(tokenizer)
        agreed = (lambda report: report) if group is None else group.agreed
        self.probe_report = choose_attention(network, attn, info.max_positions, agreed)
        self.llama = choose_llama(network, self.probe_report, info.max_positions) if fast else None
        self._pass = self._make_pass(capture)
        self.memory = MemoryPlan(weights, self.probe_report.bytes_per_token, size)
        self.info = replace(
            info,
            supports_trees=self.probe_report.ok,
            lossless=LosslessLevel.DISTRIBUTION if self.llama is None else LosslessLevel.BITWISE,
        )

    def _make_pass(self, capture: Capture | None) -> ForwardPass | LeadingPass:
        windows = layer_windows(self.network.config.get_text_config())
        own: ForwardPass
        if not self.probe_report.ok or windows is None:
            own = PathPass(self.network, self.size)
        else:
            own = TreePass(self.network, self.size, windows, capture=capture, llama=self.llama)
        return own if self._group is None or not self._group.leads else LeadingPass(own, self._group)

    def follow(self) -> None:
        """Another rank than 0: take part in the forwards of rank 0 until it ends."""
        assert self._group is not None, "follow() needs a group of ranks"
        follow(self._pass, self._group)

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[Rows], *, num_logits: Sequence[int] | None = None, reduction: Reduction | None = None
    ) -> torch.Tensor:
        """Logits float32[T, V], -inf for ids that the tokenizer does not have; or their reduction. Nothing changes if it raises."""
        kept = kept_rows(batch, num_logits)
        own = None
        if reduction is not None:
            of = reduction.of
            own = replace(reduction, of=lambda logits_TV, table: of(self._finished(logits_TV), table))
        with self.placed(batch) as entries:
            found = self._pass.run(entries, kept, own)
        return self._finished(found) if own is None else found

    def _finished(self, logits_TV: torch.Tensor) -> torch.Tensor:
        logits_TV = logits_TV.float()
        if self._num_ids < logits_TV.shape[1]:
            logits_TV[:, self._num_ids :] = -torch.inf
        return logits_TV

    def expose(self, states: Sequence[int]) -> None:
        self._pass.expose(states)

    @property
    def states(self) -> torch.Tensor:
        return self._pass.states

    @torch.inference_mode()
    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        self._pass.move(self.commit_cells(slot, node, keep_below=keep_below))


def describe(network: Any, name: str, tokenizer: Any, max_len: int | None) -> ModelInfo:
    """What the configuration and the tokenizer (or None) say of a network."""
    longest, vocab_size = max_len or DEFAULT_MAX_LEN, len(network.get_input_embeddings().weight)
    return ModelInfo(
        name=name,
        vocab_size=vocab_size,
        max_positions=min(context_of(network.config.get_text_config()) or longest, longest),
        # Configurations of cut-down models name tokens that the model has no more: it can never emit them.
        eos_ids=tuple(i for i in _eos_ids(network) if 0 <= i < vocab_size),
        tokenizer_hash="" if tokenizer is None else content_hash(tokenizer),
    )


def _eos_ids(network: Any) -> tuple[int, ...]:
    """All end-of-text ids of the model's configuration, ascending."""
    for config in (getattr(network, "generation_config", None), network.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted(set(ids if isinstance(ids, (list, tuple)) else [ids])))
    return ()


def _sample(network: Any) -> torch.Tensor:
    """Logits of a few tokens, without a cache."""
    logits: torch.Tensor = network(input_ids=torch.tensor([[1, 2, 3]], device=network.device), use_cache=False).logits
    return logits


def context_of(config: Any) -> int | None:
    """Context length of the network; None if its configuration does not give one."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if value:
            return int(value)
    return None
