"""The router on a trace: more of the prompts is found in caches than without hints, and no verifier pays for it."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.routing import least_load, ours, read_trace, round_robin, simulate

TRACE = Path(__file__).parents[2] / "data" / "routing_trace.jsonl"


@pytest.fixture(scope="module")
def trace():
    return read_trace(TRACE)


@pytest.mark.parametrize("pace", [1.0, 3.0, 6.0], ids=["calm", "busy", "crowded"])
def test_more_is_found_in_caches_and_first_tokens_come_no_later(trace, pace):
    asked = [replace(one, at_s=one.at_s / pace) for one in trace]
    by_turns, by_load, by_held = (simulate(asked, policy()) for policy in (round_robin, least_load, ours))
    for name, outcome in [("round robin", by_turns), ("least load", by_load), ("ours", by_held)]:
        print(f"{name:12} {outcome}")
    best_other = max(by_turns.hit_rate, by_load.hit_rate)
    assert by_held.hit_rate > best_other
    if pace == 1.0:  # where there is room to choose
        assert by_held.hit_rate > 1.15 * best_other
    assert by_held.first_token_s <= 1.02 * min(by_turns.first_token_s, by_load.first_token_s)
    assert by_held.spread < 1.6


def test_one_popular_prefix_does_not_draw_all_requests_to_one_verifier(trace):
    same = [
        replace(one, prompt=(*trace[0].prompt[:256], *one.prompt[256:]), at_s=i * 0.05) for i, one in enumerate(trace)
    ]
    assert simulate(same, ours()).spread < 1.3
