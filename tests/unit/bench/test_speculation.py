from __future__ import annotations

from benchmarks.speculation import CONTROLLER, Measured, summary


def measured(*rates: float) -> Measured:
    found = Measured()
    for rate in rates:
        found.add(tokens=10, seconds=10 / rate, passes=5)
    return found


def test_the_best_fixed_mode_may_be_plain_decoding_and_is_never_the_controller() -> None:
    rows = summary(
        8, 0.0, {"plain": measured(10, 20, 30), "2 nodes": measured(10, 10, 10), CONTROLLER: measured(30, 30, 30)}
    )
    found = {
        row["mode"]: (row["sessions"], row["tokens_per_pass"], row["of_plain"], row["of_best_fixed"]) for row in rows
    }
    assert found == {"plain": (8, 2.0, 1.0, 1.0), "2 nodes": (8, 2.0, 0.5, 0.5), CONTROLLER: (8, 2.0, 1.5, 1.5)}


def test_ratios_compare_rates_of_one_repetition() -> None:
    assert measured(30, 10, 20).over(measured(10, 20, 30)) == 20 / 30  # the ratio of medians is 1
