"""What a tree takes to grow, by its nodes, from rounds that are made up."""

from __future__ import annotations

import random

import pytest

from verifier_service.growth_cost import LEVEL, GrowthCost


def learned(idle_s, nodes, rounds: int = 200, noise: float = 0.0) -> GrowthCost:  # type: ignore[no-untyped-def]
    cost, dice = GrowthCost(), random.Random(1)
    for _ in range(rounds):
        n = dice.choice(nodes)
        cost.add(n, idle_s(n) * dice.uniform(1.0 - noise, 1.0 + noise))
    return cost


def test_nothing_is_known_before_the_first_round() -> None:
    assert GrowthCost().seconds(8) == 0.0
    assert GrowthCost().waits == 1.0


def test_where_all_rounds_wait_for_as_many_nodes_half_of_the_time_is_shared_among_them() -> None:
    cost = learned(lambda n: 0.010, [8])
    assert cost.seconds(8) == pytest.approx(0.010)
    assert cost.seconds(3) == pytest.approx(0.010 - 5 * 0.010 / (8 + LEVEL) / 2)


def test_a_drafter_that_draws_more_at_a_time_makes_later_nodes_cheap() -> None:
    cost = learned(lambda n: 0.040, [8] * 22 + [16, 4], noise=0.1)
    assert cost.seconds(8) == pytest.approx(0.040, rel=0.1)
    assert cost.seconds(16) < 0.040 * 1.25


def test_a_line_is_found() -> None:
    cost = learned(lambda n: 0.005 + 0.002 * n, [4, 8, 16], noise=0.05)
    for n in (4, 8, 16):
        assert cost.seconds(n) == pytest.approx(0.005 + 0.002 * n, rel=0.15)


def test_more_nodes_never_cost_less() -> None:
    cost = learned(lambda n: 0.1 / n, [2, 4, 8])
    times = [cost.seconds(n) for n in range(20)]
    assert times == sorted(times)
    assert min(times) >= 0.0


def test_rounds_that_waited_for_nothing_say_how_often_that_is() -> None:
    cost = GrowthCost()
    for i in range(400):
        if i % 4:
            cost.kept()
        else:
            cost.add(8, 0.04)
    assert cost.waits == pytest.approx(0.25, abs=0.06)
    assert cost.seconds(8) == pytest.approx(0.04)
