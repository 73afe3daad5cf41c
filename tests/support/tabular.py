"""Pairs of tabular models."""

from __future__ import annotations

from rootward.engine.tabular import TabularModel


def perturbed(target: TabularModel, noise: float, seed: int) -> TabularModel:
    """A draft model: the target's logits plus Gaussian noise of this standard deviation."""
    return TabularModel(
        target.vocab,
        target.seed,
        target.order,
        max_positions=target.info.max_positions,
        sharpness=target.sharpness,
        zeros=target.zeros,
        eos=target.eos,
        noise=noise,
        noise_seed=seed,
        max_slots=target.size.num_slots,
        tree_room=target.size.num_cells - target.info.max_positions,
    )
