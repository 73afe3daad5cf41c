"""The arithmetic of the demo; the demo itself runs in `make demo`."""

import io

import pytest
from rich.console import Console

from rootward.client.types import GenerationResult, SpeculationStats, Usage
from rootward.demo.run import Tally, shortfalls, spread, table


def tally(accepted):
    result = GenerationResult(
        "", (), (), "length", usage=Usage(9, 64), speculation=SpeculationStats(10, 0, 160, accepted)
    )
    counts = Tally()
    counts.add(result, 2.0)
    counts.add(result, 2.0)
    return counts


def test_block_efficiency_and_speed():
    assert (tally(15).block_efficiency, tally(15).speed) == (2.5, 32.0)
    assert (Tally().block_efficiency, Tally().speed) == (0.0, 0.0)


def modes(required):
    return {"required": required, "auto": tally(5), "disabled": tally(0)}


def test_promises_are_checked_one_by_one():
    good, bad = tally(15), tally(5)
    assert shortfalls({0.0: modes(good), 1.0: modes(good)}) == []
    (line,) = shortfalls({0.0: modes(good), 1.0: modes(bad)})
    assert line == "block efficiency 1.50 at temperature 1 is below the promised 1.7"


def test_the_table_shows_every_number():
    out = io.StringIO()
    Console(file=out, width=120).print(table({0.0: modes(tally(15)), 1.0: modes(tally(5))}, 2))
    assert all(number in out.getvalue() for number in ("128", "2.50", "1.50", "32.0", "(1.00×)"))


@pytest.mark.parametrize(("count", "expected"), [(3, [0, 33, 66]), (1, [0])])
def test_prompts_come_from_all_over(count, expected):
    assert spread([str(i) for i in range(100)], count) == [str(i) for i in expected]
    assert len(spread(["a", "b"], 20)) == 2
