"""Whether speculation pays: a model of rounds, on rounds that are made up. Seconds are of the made-up clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from verifier_service.cost import SIZES, WARM, Machine, StepCost
from verifier_service.gain import (
    FIRST_REST,
    LOOK,
    LOOKS,
    PLAIN_EVERY,
    PROBE_EVERY,
    TRIAL,
    TRIER_PATIENCE,
    Gain,
    Gains,
    Spent,
)

Cost = Callable[[int], float]


def flat(rows: int) -> float:
    """Few rows cost little more than one."""
    return 1.0 + 0.02 * rows


def steep(rows: int) -> float:
    """Every row costs as much as a third of a step."""
    return 1.0 + 0.5 * rows


def known(cost: Cost) -> Machine:
    table = StepCost()
    for rows in [1, 2, 4, 8, 16, 32, 64, 128, 256] * 3:
        table.add(rows, cost(rows))
    table.num_live = WARM
    return Machine(table)


class World:
    """Sessions in lockstep: node i is accepted with probability share^i; a tree of n nodes grows in growth·(n + 2)."""

    def __init__(self, cost: Cost, *, load: int = 1, share: float = 0.6, growth: float = 0.0, gain: Gain | None = None):
        self.cost, self.load, self.share, self.growth = cost, load, share, growth
        self.gain = gain or Gain(known(cost))
        self.busy = 1.0  # factor on steps while a drafter works
        self.slow = 1.0  # factor on everything
        self.rng = random.Random(1)
        self.tokens, self.seconds = 0, 0.0
        self.caps: list[list[int]] = []

    def step(self, most: int = 16) -> list[int]:
        """One round of every session; their caps."""
        caps = [self.gain.nodes(i, most, self.load) for i in range(self.load)]
        rows = sum(cap + 1 for cap in caps)
        waits = self.slow * self.growth * (max(caps) + 2) if max(caps) else 0.0
        idle_s = waits if all(caps) else 0.0  # others keep the engine busy
        step_s = self.slow * self.cost(rows) * (self.busy if any(caps) else 1.0)
        seconds = idle_s + step_s
        for i, cap in enumerate(caps):
            u = self.rng.random()
            path = tuple(n for n in range(1, cap + 1) if u < self.share**n)
            self.gain.add(i, Spent(1 + len(path), seconds, idle_s, rows, self.load, cap, path))
            self.tokens += 1 + len(path)
        self.gain._machine.stepped(rows, step_s, trees=any(caps))
        self.seconds += seconds
        self.caps.append(caps)
        return caps

    def speedup(self, steps: int) -> float:
        """Over plain decoding, everything that is lost on trials included."""
        self.tokens, self.seconds = 0, 0.0
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds * self.cost(self.load) / self.load


def test_nothing_is_tried_before_a_step_was_seen() -> None:
    gain = Gain(Machine())
    assert gain.nodes(1, 16, 1) == 0
    assert gain.speedup == 1.0


def test_what_pays_is_used_from_the_first_rounds_with_a_plain_round_now_and_then() -> None:
    world = World(flat)
    assert world.speedup(TRIAL) > 1.0
    assert world.speedup(500) > 1.7
    late = [caps[0] for caps in world.caps[-2 * PLAIN_EVERY :]]
    assert late.count(0) == 2
    assert 1.5 < world.gain.speedup < 3.0


def test_trees_are_tried_although_no_plain_step_is_ever_seen() -> None:
    """Others use trees in every step: those that require them, or a prompt is always being read."""
    gain = Gain(known(flat))
    gain._machine.steps.num_live, caps = 0, []
    for _ in range(LOOKS + 1):
        caps.append(gain.nodes(1, 16, 1))
        gain._machine.stepped(9, flat(9), trees=True)
    assert [bool(cap) for cap in caps] == [False] * LOOKS + [True]


def test_doubt_about_plain_steps_ends_where_none_are_seen() -> None:
    world = World(flat)
    world.busy = 1.6  # trees pay, but not by much
    world.speedup(100)
    caps = []
    for _ in range(1000):  # somebody else's, on a machine that changes its speed
        caps.append(world.gain.nodes(0, 16, 1))
        world.gain._machine.stepped(9, world.rng.choice([1.6, 2.4]) * flat(9), trees=True)
    assert 0 < caps.count(0) <= 10 * LOOK  # each time after twice as many steps
    assert 0 not in caps[-300:]


@pytest.mark.parametrize("sizes", [(1, 1), (7, 1), (4, 4)])
def test_two_kinds_of_sessions_look_at_the_same_time(sizes: tuple[int, int]) -> None:
    """After a while trees make steps four times as slow. A plain step tells, and none is plain as long as one kind goes on."""
    gains, load, rng = Gains(known(flat)), sum(sizes), random.Random(3)
    kinds = [gains.of(kind) for kind, size in enumerate(sizes) for _ in range(size)]
    history = []
    for step in range(700):
        caps = [gain.nodes(i, 16, load) for i, gain in enumerate(kinds)]
        seconds = flat(sum(caps) + load) * (4.0 if step > 200 and any(caps) else 1.0)
        gains.machine.stepped(sum(caps) + load, seconds, trees=any(caps))
        for i, (gain, cap) in enumerate(zip(kinds, caps, strict=True)):
            u = rng.random()
            path = tuple(n for n in range(1, cap + 1) if u < 0.6**n)
            gain.add(i, Spent(1 + len(path), seconds, 0.0, sum(caps) + load, load, cap, path))
        history.append(any(caps))
    assert sum(history[:200]) > 150
    assert sum(history[450:]) < 30


def blocks(rows: int) -> float:
    """Kernels work in blocks of six rows, and every block after the first costs a third of a step."""
    return 1.0 + (rows - 1) // 6 / 3


@pytest.mark.parametrize("at_start", [0.6, 1.0, 1.5])
def test_a_machine_that_changes_its_speed_is_no_reason_to_despair_or_to_change_the_trees(at_start: float) -> None:
    """What else runs there makes plain steps as much slower as steps with trees; only the latter are seen most of the time."""
    table, rng = StepCost(), random.Random(7)
    for rows in SIZES * 2:
        table.add(rows, at_start * blocks(rows))
    table.at_work()
    world = World(blocks, share=0.55, growth=0.02, gain=Gain(Machine(table)))
    num_changes = 40
    for _ in range(num_changes):
        world.slow = rng.choice([1.0, 1.0, 1.2, 1.6])
        world.speedup(25)
    late = [caps[0] for caps in world.caps[100:]]
    assert late.count(5) > 0.8 * len(late), sorted(late)  # with six or seven a second block is paid for
    assert late.count(0) <= len(late) // PLAIN_EVERY + num_changes  # one look at what plain steps cost now


def test_the_number_of_nodes_is_the_best_of_all() -> None:
    world = World(flat, share=0.75)
    world.speedup(3000)
    rates = [sum(0.75**i for i in range(n + 1)) / flat(n + 1) for n in range(17)]
    usual = sorted(caps[0] for caps in world.caps[-200:])[100]
    assert rates[usual] > 0.97 * max(rates)


def test_larger_trees_are_probed_so_that_the_worth_of_late_nodes_stays_known() -> None:
    world = World(steep, share=0.9, gain=Gain(known(lambda rows: 1.0 + 0.1 * rows)))
    world.cost = lambda rows: 1.0 + 0.1 * rows
    world.speedup(400)
    late = [caps[0] for caps in world.caps[-4 * PROBE_EVERY :]]
    usual = sorted(late)[len(late) // 2]
    assert 2 <= sum(cap >= min(16, 2 * usual - 2) for cap in late) <= 6


@pytest.mark.parametrize("load", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(
    ("cost", "share", "growth"), [(flat, 0.02, 0.1), (flat, 0.6, 1.0), (steep, 0.6, 0.0), (steep, 0.3, 0.3)]
)
def test_it_is_never_much_slower_than_plain_decoding(cost: Cost, share: float, growth: float, load: int) -> None:
    assert World(cost, load=load, share=share, growth=growth).speedup(6000 // (load + 4)) > 0.97


@pytest.mark.parametrize("load", [1, 4, 16])
def test_where_rows_are_nearly_free_all_sessions_speculate(load: int) -> None:
    world = World(lambda rows: 1.0 + 0.001 * rows, load=load, growth=0.01)
    assert world.speedup(400) > 1.8
    assert sum(cap > 0 for cap in world.caps[-2]) >= load - 1


def test_one_session_tries_while_the_others_decode_plainly_and_another_goes_on_with_its_trial() -> None:
    world = World(flat, load=4)
    assert [cap > 0 for cap in world.step()] == [True, False, False, False]
    world.gain.gone(0)
    assert world.gain.nodes(2, 16, 4) > 0
    assert not world.gain.uses_trees(0)


def test_a_trial_that_fails_is_repeated_later_and_later() -> None:
    world = World(flat, growth=1.0)
    for _ in range(20 * FIRST_REST):
        world.step()
    tried = [i for i, caps in enumerate(world.caps) if caps[0]]
    starts = [i for i, before in zip(tried, [-2, *tried], strict=False) if i - before > 1]
    pauses = [b - a for a, b in pairwise(starts)]
    assert len(tried) <= TRIAL * len(starts)
    assert pauses == sorted(pauses)
    assert min(pauses, default=FIRST_REST) >= FIRST_REST


def test_trials_go_on_where_the_drafter_may_have_become_faster() -> None:
    world = World(flat, growth=0.3)
    world.speedup(400)
    world.growth = 0.0
    world.speedup(8000)
    assert world.speedup(200) > 1.5


def test_where_the_prior_sees_no_hope_nothing_is_tried() -> None:
    world = World(lambda rows: float(rows))
    for _ in range(500):
        assert world.step() == [0]


def test_what_large_steps_cost_is_found_out_in_the_end_if_it_was_measured_wrongly() -> None:
    world = World(flat, gain=Gain(known(lambda rows: flat(1) if rows == 1 else 40.0)))
    world.speedup(200)
    assert not any(caps[0] for caps in world.caps)
    world.speedup(10000)
    assert world.speedup(200) > 1.5


@pytest.mark.parametrize("load", [1, 4, 8])
def test_a_drafter_that_slows_the_engine_down_is_not_taken_for_a_slow_machine(load: int) -> None:
    """Steps are four times as slow while it works: what plain decoding costs is known from those without it."""
    world = World(flat, load=load)
    world.busy = 4.0
    assert world.speedup(800) > 0.97
    assert not any(map(any, world.caps[-20:]))


@pytest.mark.parametrize("load", [1, 8, 16])
def test_no_drafter_follows_a_text_whose_rounds_have_no_trees(load: int) -> None:
    """Trees paid once and do not pay any more, by little: then nobody uses them, instead of all using trees of no nodes."""
    world = World(flat, load=load)
    world.speedup(100)
    assert world.gain.uses_trees(0)
    world.growth = 0.3 if load == 1 else 0.0
    world.busy = 1.0 if load == 1 else 2.2
    world.speedup(400)
    for caps in world.caps[-40:]:
        assert caps == [0] * load
    assert not any(world.gain.uses_trees(i) for i in range(load))


def test_the_end_of_a_request_says_nothing_of_trees() -> None:
    world = World(flat, growth=0.15)
    world.speedup(100)
    assert world.gain.uses_trees(0)
    for _ in range(20):
        assert world.gain.nodes(0, 1, 1, 16) in (0, 1)  # one node would not pay for its wait
        assert world.gain.uses_trees(0)


def test_a_trial_whose_tree_never_comes_ends() -> None:
    gain = Gain(known(flat))
    assert gain.nodes(1, 16, 1) > 0
    for _ in range(TRIER_PATIENCE):
        gain.add(1, Spent(1, 1.0))
    assert not gain.uses_trees(1)
    assert gain.nodes(1, 16, 1) == 0


def test_waiting_in_vain_counts_against_trees() -> None:
    gain = Gain(known(flat))
    for _ in range(8 * TRIAL):
        cap = gain.nodes(1, 16, 1)
        gain.add(1, Spent(1, 3.0 if cap else 1.0, 2.0 if cap else 0.0, cap=cap))
    assert not gain.uses_trees(1)


def test_kinds_share_what_the_machine_costs_and_nothing_else() -> None:
    gains = Gains(known(flat))
    one, two = gains.of("a"), gains.of("b")
    assert gains.of("a") is one
    assert gains.speedup == 1.0
    for _ in range(30):
        two.add(1, Spent(3, 1.5, 0.4, cap=4, path=(1, 2)))
    assert gains.speedup == two.speedup > 1.9
    assert one.speedup == 1.0
    assert one.worth.tokens(4) < two.worth.tokens(4)
    assert max(one.expected(4, 1)) < max(Gain(known(flat)).expected(4, 1))  # growth takes time, it has learned
