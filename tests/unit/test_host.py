"""Variables of the environment that the host module sets."""

from __future__ import annotations

import pytest

from rootward import host


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [
        ({}, "20000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, None),  # drafters of `serve all`: a spin count would overrule it
        ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7"}, "7"),
    ],
)
def test_spinning_is_shortened_unless_the_environment_decides(
    given: dict[str, str], spin_count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.os, "environ", given)
    host.shorten_spinning()
    assert given.get("GOMP_SPINCOUNT") == spin_count
