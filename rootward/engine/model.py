"""A Hugging Face causal language model behind `ports.LanguageModel`.

Legend: T wanted rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rootward.engine.attention import layer_windows
from rootward.engine.checkpoint import fingerprint, num_bytes, read_network
from rootward.engine.graphs import Capture, CudaCapture
from rootward.engine.layers import replace_linears
from rootward.engine.parallel import Group, LeadingPass, follow
from rootward.engine.passes import ForwardPass, PathPass, TreePass
from rootward.engine.probe import choose_attention, choose_llama
from rootward.engine.slots import MemoryPlan, Size, Slots, SlottedModel, kept_rows
from rootward.engine.tokenizers import content_hash, find_tokenizer, num_ids
from rootward.errors import ConfigurationError
from rootward.ports import LosslessLevel, ModelInfo, Reduction, Rows

log = logging.getLogger(__name__)

DEFAULT_MAX_LEN = 8192
BLOCK_SIZE = 16  # cells of a KV block


class HuggingFaceModel(SlottedModel):
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
        config = network.config.get_text_config()
        wanted = max_len or DEFAULT_MAX_LEN
        max_positions = min(context_of(config) or wanted, wanted)
        vocab = int(network.get_input_embeddings().weight.shape[0])
        num_parameters, identity = sum(p.numel() for p in network.parameters()), fingerprint(network, adapter)
        weights = num_bytes(network)
        fast = fast and group is None and replace_linears(network, lambda: _sample(network))
        try:
            size = Size.of(max_slots, max_positions, tree_room, BLOCK_SIZE, kv_cache_tokens)
        except ValueError as wrong:
            raise ConfigurationError(f"model: {name!r}: {wrong}") from wrong
        self._slots = Slots(size, vocab, identity)
        self._num_ids = vocab if tokenizer is None else min(num_ids(tokenizer), vocab)
        agreed = (lambda report: report) if group is None else group.agreed
        self.probe_report = choose_attention(network, attn, max_positions, agreed)
        self.llama = choose_llama(network, self.probe_report, max_positions) if fast else None
        self._pass = self._make_pass(config, capture)
        self.memory = MemoryPlan(weights, self.probe_report.bytes_per_token, size)
        self._info = ModelInfo(
            name=name,
            vocab_size=vocab,
            max_positions=max_positions,
            eos_ids=eos_ids(network),
            tokenizer_hash="" if tokenizer is None else content_hash(tokenizer),
            num_parameters=num_parameters,
            supports_trees=self.probe_report.ok,
            fingerprint=identity,
            lossless=LosslessLevel.DISTRIBUTION if self.llama is None else LosslessLevel.BITWISE,
        )

    @classmethod
    def load(
        cls,
        path_or_name: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_slots: int = 8,
        max_len: int | None = None,
        tree_room: int = 256,
        kv_cache_tokens: int | None = None,
        require_trees: bool = False,
        group: Group | None = None,
        adapter: str | None = None,
        quantization: str | None = None,
        cuda_graphs: bool = False,
    ) -> HuggingFaceModel:
        """Read a folder or hub name. ConfigurationError: exit code 2 if that fails, 3 if required trees are refused."""
        _check_device(device, cuda_graphs)
        network = read_network(
            path_or_name, device=device, dtype=dtype, quantization=quantization, adapter=adapter, group=group
        )
        model = cls(
            network,
            name=path_or_name,
            tokenizer=find_tokenizer(path_or_name),
            max_slots=max_slots,
            max_len=max_len,
            tree_room=tree_room,
            kv_cache_tokens=kv_cache_tokens,
            group=group,
            adapter=adapter,
            capture=CudaCapture(device) if cuda_graphs else None,
        )
        if group is None or group.leads:
            log.info("%s: %s", path_or_name, model.memory)
            how = ", steps are recorded" if cuda_graphs else ", in few operations" if model.llama else ""
            log.info("%s: attention %s%s", path_or_name, model.probe_report.attention or "none", how)
            log.info("%s: losslessness at temperature 0: %s", path_or_name, model.info.lossless.value)
        if not model.info.supports_trees:
            message = f"model: {path_or_name!r} cannot run token trees: {model.probe_report.reason}"
            if require_trees:
                raise ConfigurationError(f"{message}; use another model, or serve it without speculation", exit_code=3)
            log.warning("%s; it decodes plainly, without a KV cache", message)
        return model

    def _make_pass(self, config: Any, capture: Capture | None) -> ForwardPass | LeadingPass:
        windows = layer_windows(config)
        own: ForwardPass
        if not self.probe_report.ok or windows is None:
            own = PathPass(self.network, self._slots.size)
        else:
            ragged = self.probe_report.ragged
            own = TreePass(self.network, self._slots.size, windows, ragged=ragged, capture=capture, llama=self.llama)
        return own if self._group is None or not self._group.leads else LeadingPass(own, self._group)

    def follow(self) -> None:
        """Another rank than 0: take part in the forwards of rank 0 until it ends."""
        assert self._group is not None, "follow() needs a group of ranks"
        follow(self._pass, self._group)

    @property
    def info(self) -> ModelInfo:
        return self._info

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
        with self._slots.placed(batch) as entries:
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
        self._pass.move(self._slots.commit(slot, node, keep_below=keep_below))


def _check_device(device: str, cuda_graphs: bool) -> None:
    cuda = torch.device(device).type == "cuda"
    if cuda_graphs and not cuda:
        raise ConfigurationError(f"cuda_graphs: device {device!r} has none; leave it out")
    if cuda and not torch.cuda.is_available():
        raise ConfigurationError(f"device: {device!r}, but torch {torch.__version__} finds no CUDA device; use cpu")


def eos_ids(network: Any) -> tuple[int, ...]:
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
