"""Processes end when the one that started them is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from rootward.guard import Guard

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = f"""
import subprocess, time
from rootward.guard import Guard

with Guard() as guard:
    ended, left = (subprocess.Popen({SLEEP!r}) for _ in range(2))
    guard.started(ended.pid)
    guard.started(left.pid)
    ended.kill()
    ended.wait()
    guard.ended(ended.pid)
    print(left.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="a process that is no child of this one is watched by its descriptor"
)
def test_children_of_a_killed_process_end() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        left = int(parent.stdout.readline())
        descriptor = os.pidfd_open(left)
        try:
            parent.kill()
            assert select.select([descriptor], [], [], 30)[0], "it runs on"
        finally:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def test_a_process_that_has_ended_is_not_signalled() -> None:
    with subprocess.Popen(SLEEP) as child:
        with Guard() as guard:
            guard.started(child.pid)
            guard.ended(child.pid)
        assert child.poll() is None
        with Guard() as guard:
            guard.started(child.pid)
        assert child.wait(30) == -signal.SIGTERM


def test_the_death_of_the_guard_itself_is_no_error() -> None:
    with Guard() as guard:
        guard._process.kill()
        guard._process.wait()
        guard.started(os.getpid())


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
KILLED = """
import os, sys
from rootward.guard import Guard

with Guard(0.2) as guard:
    guard.started(int(sys.argv[1]))
    os.kill(os.getpid(), 9)
"""


def test_a_process_that_does_not_end_by_itself_is_killed() -> None:
    """One that hangs stayed for ever, with its port and its model."""
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            killed = subprocess.run([sys.executable, "-c", KILLED, str(child.pid)], check=False, timeout=60)
            assert killed.returncode == -signal.SIGKILL
            assert child.wait(60) == -signal.SIGKILL
        finally:
            child.kill()
