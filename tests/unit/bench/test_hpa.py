"""The model of the HPA against values that the live controller of Kubernetes 1.36 gave."""

import pytest

from benchmarks.hpa import DEFAULT_DOWN, DEFAULT_UP, Autoscaler, Policy, Rules, Spec, Target

DEMAND, BUSY, STALL = Target("AverageValue", 2.8), Target("Value", 0.85), Target("Value", 0.10)
OPEN = Rules(0, (Policy("Pods", 1000, 15),))  # no window, no limit
CAREFUL = Rules(180, (Policy("Pods", 2, 60), Policy("Percent", 20, 60)), "Min")


def once(targets, values, spec=1, ready=None, status=None, *, up=OPEN, down=OPEN, **more):
    autoscaler = Autoscaler(Spec(tuple(targets), most=100, up=up, down=down, **more))
    return autoscaler.sync(0.0, spec, spec if ready is None else ready, values, status)


@pytest.mark.parametrize(
    ("spec", "status", "total", "expected"),
    [(2, 2, 45, 17), (3, 3, 9.0, 3), (3, 3, 9.25, 4), (3, 3, 7.5, 3), (8, 3, 9.0, 3), (1, 1, 84, 30)],
)
def test_average_value(spec, status, total, expected):
    assert once([DEMAND], [total], spec, status=status) == expected


def test_from_zero_with_the_gate():
    on = {"up": DEFAULT_UP, "down": DEFAULT_DOWN, "least": 0, "scale_to_zero": True}
    assert once([DEMAND], [5], 0, **on) == 2
    assert once([BUSY], [2.0], 0, **on) == 3
    percent_only = Rules(0, (Policy("Percent", 100, 15),))
    assert once([DEMAND], [5], 0, **(on | {"up": percent_only})) == 0  # twice nothing is nothing


def test_zero_without_the_gate_is_switched_off():
    assert once([DEMAND], [100], 0) == 0


@pytest.mark.parametrize(
    ("spec", "ready", "value", "expected"), [(4, 4, 0.97, 5), (4, 4, 0.93, 4), (8, 4, 0.97, 5), (8, 8, 0.3, 3)]
)
def test_value_counts_ready_pods_alone(spec, ready, value, expected):
    assert once([BUSY], [value], spec, ready) == expected


@pytest.mark.parametrize(
    ("targets", "values", "expected"),
    [
        ((DEMAND, BUSY, STALL), (5, 0.97, 0.15), 6),
        ((DEMAND, BUSY), (5, None), 4),
        ((DEMAND, BUSY), (45, None), 17),
        ((DEMAND, BUSY), (None, None), 4),
    ],
)
def test_several_metrics(targets, values, expected):
    """The largest wins; while one is missing nothing shrinks; while all are, nothing moves."""
    assert once(targets, values, 4) == expected


@pytest.mark.parametrize(("spec", "expected"), [(1, 5), (6, 12)])
def test_default_policies_up(spec, expected):
    assert once([DEMAND], [45], spec, up=DEFAULT_UP, down=DEFAULT_DOWN) == expected


@pytest.mark.parametrize(("spec", "expected"), [(17, 15), (6, 4), (4, 3)])
def test_careful_policies_down(spec, expected):
    careful = Rules(0, CAREFUL.policies, "Min")
    assert once([DEMAND], [3], spec, down=careful) == expected


@pytest.mark.parametrize(("spec", "expected"), [(0, 0), (1, 3), (12, 9), (5, 5)])
def test_outside_the_bounds_it_goes_there_at_once(spec, expected):
    autoscaler = Autoscaler(Spec((DEMAND,), least=3, most=9))
    assert autoscaler.sync(0, spec, spec, [14.0]) == expected


def test_disabled_holds():
    never = Rules(0, OPEN.policies, "Disabled")
    assert once([DEMAND], [45], 3, up=never) == 3
    assert once([DEMAND], [1], 3, down=never) == 3


def trace(total_at, *, until_s, replicas, up, down):
    autoscaler = Autoscaler(Spec((DEMAND,), up=up, down=down))
    changes = []
    for now_s in range(0, until_s, 15):
        new = autoscaler.sync(float(now_s), replicas, replicas, [total_at(now_s)])
        if new != replicas:
            changes.append((now_s, new))
        replicas = new
    return changes


def test_a_step_up_and_down_with_the_behaviour_of_the_chart():
    changes = trace(lambda t: 24 if 300 <= t < 600 else 3, until_s=1200, replicas=2, up=DEFAULT_UP, down=CAREFUL)
    assert changes == [(300, 6), (315, 9), (765, 7), (825, 5), (885, 4), (945, 3), (1005, 2)]


def test_a_step_up_and_down_with_the_defaults():
    total = lambda t: 84 if 60 <= t < 300 else 2.8  # noqa: E731
    changes = trace(total, until_s=900, replicas=1, up=DEFAULT_UP, down=DEFAULT_DOWN)
    assert changes == [(60, 5), (75, 10), (90, 20), (105, 30), (585, 1)]
