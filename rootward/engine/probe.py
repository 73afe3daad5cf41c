"""The load probe: tests whether a network runs token trees correctly, instead of relying on a list of architectures.

A ragged batch of small trees is run on the KV trees and, row by row, in cache-free forwards with the network's own eager attention; then a
path is committed and one more token decoded. Features that a short probe cannot detect (state that spans the batch or the context) are
refused by the configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rootward.engine import tree_attention
from rootward.engine.attention import layer_windows
from rootward.engine.layers import LlamaNetwork, is_llama
from rootward.engine.passes import PathPass, TreePass
from rootward.engine.slots import Size, Slots, kept_rows
from rootward.errors import first_line
from rootward.ports import COMMITTED, Rows

log = logging.getLogger(__name__)

NUM_CELLS, TREE_ROOM, BLOCK_SIZE, NARROW_WINDOW = 64, 16, 4, 4
PREFIXES = (6, 9, 3)  # committed tokens of the three slots
PARENTS = ([COMMITTED, 0, 0, 1, 1, 2, 3], [COMMITTED], [COMMITTED, 0, 0])  # their trees
STOPS = (4, 0, 2)  # the node each commits

# Error of the logits of a row over their spread, root mean square over the rows of a step. float32: observed at most 1e-5, a wrong mask
# shows above 1e-2. Half types round at 2^-8 or 2^-11 in every layer: observed up to 0.14 (30 layers in bfloat16), a wrong mask from 0.5 on.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
HALF_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result of the probe. `reason`: why trees are refused."""

    ok: bool
    attention: str = ""
    max_error: float = 0.0
    reason: str = ""
    bytes_per_token: int = 0  # of K and V in all layers


def choose_attention(
    network: Any, attn: str, max_positions: int, agreed: Callable[[ProbeReport], ProbeReport] = lambda report: report
) -> ProbeReport:
    """Probe the attention implementations, the fastest first and eager last; the network keeps the one that is reported.

    `agreed` is called with each report and returns that of rank 0: processes that share a network must choose the same.
    """
    if why := refusal(network, max_positions):
        return ProbeReport(False, reason=why)
    before = network.config._attn_implementation
    ours = tree_attention.NAMES if attn == "sdpa" and tree_attention.serves(network.device) else ()
    report = ProbeReport(False)
    for attention in dict.fromkeys([*ours, attn, "eager"]):
        report = agreed(_attempt(network, attention))
        if report.ok:
            return report
    network.set_attn_implementation(before)
    return report


def _attempt(network: Any, attention: str) -> ProbeReport:
    """One probe. Any exception of the network becomes a reason for refusal."""
    try:
        network.set_attn_implementation(attention)
        error, bytes_per_token = probe(network)
    except Exception as wrong:
        why = f"{attention} attention: {type(wrong).__name__}: {first_line(wrong)}"
        return ProbeReport(False, attention, reason=why)
    tolerance = _tolerance(network)
    if error <= tolerance:  # false for NaN
        return ProbeReport(True, attention, error, bytes_per_token=bytes_per_token)
    why = f"{attention} attention: tree rows are off by {error:.1e}, tolerance {tolerance:.1e}"
    return ProbeReport(False, attention, error, why)


def choose_llama(network: Any, report: ProbeReport, max_positions: int) -> LlamaNetwork | None:
    """A `LlamaNetwork` that computes the same as the network in fewer operations; None if the architecture is another one or the probe
    fails. The network's linear layers have been replaced."""
    if report.attention not in tree_attention.NAMES or not is_llama(network):
        return None
    try:
        short = LlamaNetwork(network, max(max_positions, NUM_CELLS))
        error, _ = probe(network, short)
        if error <= _tolerance(network):  # false for NaN
            return short
        why = f"it is off by {error:.1e}"
    except Exception as wrong:  # a failure of the fast form must not keep the network from being served
        why = str(wrong)
    log.warning("%s runs as it is; in fewer operations: %s", type(network).__name__, why)
    return None


def _tolerance(network: Any) -> float:
    return TOLERANCE.get(network.dtype, HALF_TOLERANCE)


@torch.inference_mode()
def probe(network: Any, short: LlamaNetwork | None = None) -> tuple[float, int]:
    """Relative difference between tree rows and cache-free forwards, and bytes of K and V per token.

    short: computes the tree rows instead of the network."""
    config = network.config.get_text_config()
    with narrow_window(config):
        windows = layer_windows(config)
        assert windows is not None
        size = Size.of(len(PREFIXES), NUM_CELLS - TREE_ROOM, TREE_ROOM, BLOCK_SIZE, None)
        tree, path = TreePass(network, size, windows, llama=short), PathPass(network, size)
        error = _compare(tree, path, Slots(size, int(config.vocab_size), ""))
        return error, tree.kv.bytes_per_token


def _compare(tree: TreePass, path: PathPass, slots: Slots) -> float:
    rng = np.random.default_rng(0)
    order = (2, 0, 1)

    def tokens(num: int) -> list[int]:
        drawn: list[int] = rng.integers(0, min(slots.vocab_size, 1000), num).tolist()
        return drawn

    def chains(lengths: tuple[int, ...]) -> list[Rows]:
        return [Rows.chain(s, 100, tokens(lengths[s])) for s in order]

    def tree_of(slot: int, parents: list[int]) -> Rows:
        return Rows(slot, np.arange(len(parents)), np.array(parents), np.array(tokens(len(parents))))

    for _ in order:
        slots.open()
    worst = 0.0
    steps = (
        (chains(PREFIXES), [99 + PREFIXES[s] for s in order]),
        ([tree_of(s, PARENTS[s]) for s in order], [STOPS[s] for s in order]),
        (chains((1, 1, 1)), [100, 100, 100]),
        ([tree_of(0, PARENTS[2])], [2]),  # one entry has no padding
    )
    for batch, stops in steps:
        kept = kept_rows(
            batch, [1 if len(r.node) > 8 or (len(r.node) > 2 and r.slot == 2) else len(r.node) for r in batch]
        )
        with slots.placed(batch) as entries:
            got = tree.run(entries, kept).float()
            with eager(path.network):
                expected = path.run(entries, kept).float()
        spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-12)
        error = float(((got - expected).norm(dim=-1) / spread).square().mean().sqrt())
        worst = max(worst, error) if error == error else error  # NaN stays
        for rows, stop in zip(batch, stops, strict=True):
            moves = slots.commit_cells(rows.slot, stop, keep_below=False)
            tree.move(moves)
            path.move(moves)
    return worst


@contextmanager
def eager(network: Any) -> Iterator[None]:
    """The network's own attention: it drops no cap and no sink, which others do without a word."""
    before = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(before)


@contextmanager
def narrow_window(config: Any) -> Iterator[None]:
    """A sliding window so short that the probe's few tokens reach past it."""
    window = getattr(config, "sliding_window", None)
    if window is None or window <= NARROW_WINDOW:
        yield
        return
    config.sliding_window = NARROW_WINDOW
    try:
        yield
    finally:
        config.sliding_window = window


def refusal(network: Any, max_positions: int) -> str:
    """Why trees are refused without a probe; "" if nothing speaks against them."""
    config = network.config.get_text_config()
    if getattr(network, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot branch"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "its positions (ALiBi) come from the mask"
    if layer_windows(config) is None:
        return f"it has layers of kind {sorted(set(config.layer_types))}"
    for mark in ("num_kv_shared_layers", "index_topk", "attention_types", "attention_chunk_size"):
        if getattr(config, mark, None):
            return f"its attention ({mark}) is not covered by the probe"
    return _rope_refusal(config, max_positions)


def _rope_refusal(config: Any, max_positions: int) -> str:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        kind = part.get("rope_type", part.get("type"))
        if "mrope_section" in part:
            return "its positions have three dimensions (mrope)"
        original = (
            part.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if kind in ("longrope", "dynamic") and max_positions > original:
            return f"{kind} RoPE lets one session change another's positions; set max_len to at most {original}"
    return ""
