"""`rootward bench distance`: ratios within a turn, and a short run."""

from __future__ import annotations

import json

import pytest

from benchmarks.distance import LAWS, Point, claims, main


def points() -> list[Point]:
    """Three turns of a machine that gets slower and slower."""
    rates = {"plain": (16.0, 16.0)}
    for name in LAWS:
        rates |= {f"{name} waiting": (37.5, 30.0), f"{name} not ahead": (40.0, 32.0), name: (40.0, 36.0)}
    return [
        Point(name, ms, turn, rate / (1 + turn), 3.0, 1.0, 0.8, 500.0)
        for turn in range(3)
        for name, pair in rates.items()
        for ms, rate in zip((0.0, 20.0), pair, strict=True)
    ]


def test_claims_are_ratios_to_zero_distance_and_to_waiting_within_a_turn() -> None:
    told = claims(points(), 20.0)
    assert told["traversal of zero"].median == pytest.approx(0.9)
    assert told["coupled of waiting"].median == pytest.approx(1.2)
    assert told["coupled of not ahead"].median == pytest.approx(36 / 32)
    assert "coupled of zero" not in claims(points(), 0.0)
    assert all(value.low == pytest.approx(value.high) for value in told.values())


def test_distances_without_zero_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rtts", "10"]) == 2
    assert "--rtts" in capsys.readouterr().err


@pytest.mark.long
def test_a_short_run_writes_its_points(tmp_path) -> None:
    flags = [
        "--rtts",
        "0",
        "30",
        "--verify-ms",
        "20",
        "--draft-ms",
        "1",
        "--max-tokens",
        "30",
        "--turns",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main(flags) == 0
    report = json.loads((tmp_path / "distance.json").read_text())
    assert len(report["points"]) == 14
