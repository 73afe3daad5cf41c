"""Variables of the environment that the host module sets, and its folders."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

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


def test_kernels_have_another_folder_where_that_of_the_user_is_there_but_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a read-only root whose image has the folder: numba takes no folder that it cannot write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usual = host.folder_of_kernels("1")
    assert usual == tmp_path / "rootward" / "kernels" / "1"
    temporary_file = host.tempfile.TemporaryFile

    def read_only(*, dir: Path) -> Any:
        if Path(dir) == usual:
            raise OSError(errno.EROFS, "Read-only file system")
        return temporary_file(dir=dir)

    monkeypatch.setattr(host.tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr(host.tempfile, "tempdir", str(tmp_path))
    other = host.folder_of_kernels("1")
    assert other.is_dir()
    assert other != usual
    assert host.folder_of_kernels("2") == tmp_path / "rootward" / "kernels" / "2"
