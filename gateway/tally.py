"""Speculation counts of attempts that did not live to report them, and of all attempts together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from rootward.core.requests import SpeculationStats


def derived(accepted: Sequence[bool]) -> SpeculationStats:
    """Counts as far as committed tokens tell: every round ends with its bonus token.

    A round without accepted tokens counts as plain, though a tree may have been verified; nodes verified are unknown, so
    only the accepted ones are counted.
    """
    lengths, length = [], 0
    for flag in accepted:
        if flag:
            length += 1
        else:
            lengths.append(length)
            length = 0
    if length:  # cut inside a round
        lengths.append(length)
    histogram = [lengths.count(n) for n in range(max(lengths, default=-1) + 1)]
    num_tree = sum(n > 0 for n in lengths)
    total = sum(lengths)
    return SpeculationStats(num_tree, len(lengths) - num_tree, total, total, tuple(histogram))


def predicted(prediction: Sequence[int], output: Sequence[int]) -> tuple[int, int] | None:
    """(tokens of the prediction that the output has, the others), wherever they stand; None without a prediction."""
    if not prediction:
        return None
    both = (Counter(prediction) & Counter(output)).total()
    return both, len(prediction) - both


def joined(first: SpeculationStats, second: SpeculationStats) -> SpeculationStats:
    """Both together; names are those of the second."""
    pairs = zip_longest(first.acceptance_histogram, second.acceptance_histogram, fillvalue=0)
    return SpeculationStats(
        first.num_spec_steps + second.num_spec_steps,
        first.num_plain_steps + second.num_plain_steps,
        first.num_draft_tokens + second.num_draft_tokens,
        first.num_accepted_draft_tokens + second.num_accepted_draft_tokens,
        tuple(a + b for a, b in pairs),
        first.num_drafter_misses + second.num_drafter_misses,
        second.drafter,
        second.verification,
        second.seed,
    )
