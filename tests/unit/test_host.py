"""Variables of the environment that the host module sets."""

from __future__ import annotations

import pytest

from rootward import host


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"), ({"GOMP_SPINCOUNT": "7"}, None)],
)
def test_idle_threads_sleep_unless_the_environment_decides(
    given: dict[str, str], policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.os, "environ", given)
    host.let_idle_threads_sleep()
    assert given.get("OMP_WAIT_POLICY") == policy
