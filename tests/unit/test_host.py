"""Variables of the environment that the host module sets, and processes that end with this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.processes import wait_until

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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel tells no process that its parent has ended")
def test_a_process_ends_with_the_one_that_started_it_however_that_ends() -> None:
    program = (
        "import os, signal, subprocess\n"
        "from rootward.host import ending_with_this_process\n"
        "started = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, preexec_fn=ending_with_this_process())\n"
        "print(started.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not os.path.exists(f"/proc/{int(done.stdout)}"), what="the process")
