"""A process of the fork server behaves like a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest
from support.fork_server import Forked
from support.processes import started, wait_until

pytestmark = pytest.mark.services

SEEN = """
import json, os, signal, sys, threading
handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)]
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3]
modules = [name for name in sys.modules if name.partition(".")[0] in ("rootward", "verifier_service", "gateway", "support")]
seen = [sys.argv, sys.path, os.getcwd(), dict(os.environ), __name__, __file__, handlers, files, modules, sys.flags]
print(json.dumps([*seen, len(threading.enumerate()), sys.stdin.fileno(), sys.modules["__main__"].__dict__ is globals()]))
"""


def ended(command: list[str]) -> tuple[int, str, str, bool]:
    """Return code, output, log, and whether it was a fork."""
    with tempfile.TemporaryFile("w+") as log:
        process = started(command, log)
        assert process.stdout is not None
        with process.stdout:
            out = process.stdout.read()
        code = process.wait(240)
        log.seek(0)
        return code, out, log.read(), isinstance(process, Forked)


def new_interpreter(command: list[str]) -> tuple[int, str, str]:
    variables = dict(os.environ)  # without those that libraries have added below Python
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("is_module", [True, False])
def test_arguments_environment_and_handlers_equal_those_of_a_new_interpreter(
    is_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROOTWARD_NUM_THREADS", "7")
    command = [sys.executable, *(["-m", "seen"] if is_module else [str(tmp_path / "seen.py")]), "--flag", "a b"]
    code, out, log, forked = ended(command)
    assert forked
    assert (code, log) == (0, "")
    assert json.loads(out) == json.loads(new_interpreter(command)[1])


@pytest.mark.parametrize(
    "ending", ["sys.exit(3)", "sys.exit('a reason')", "1 / 0", "os.kill(os.getpid(), 9)", "os.abort()"]
)
def test_exit_code_output_and_error_equal_those_of_a_new_interpreter(ending: str, tmp_path: Path) -> None:
    """An error is the last line of its log, and what ends with the interpreter is done."""
    file = tmp_path / "ending.py"
    file.write_text(f"import atexit, os, sys\natexit.register(print, 'the end', flush=True)\n{ending}\n")
    command = [sys.executable, str(file)]
    code, out, log, forked = ended(command)
    expected = new_interpreter(command)
    assert forked
    assert (code, out) == expected[:2]
    assert log.splitlines()[-1:] == expected[2].splitlines()[-1:]


def test_waiting_for_it_and_signals_work_as_for_a_child(tmp_path: Path) -> None:
    file = tmp_path / "waiting.py"
    default_handler = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # also where the tests run in the background of a shell
    file.write_text(f"import signal, time\n{default_handler}\nprint('ready', flush=True)\ntime.sleep(600)\n")
    with tempfile.TemporaryFile("w+") as log:
        processes = [started([sys.executable, str(file)], log) for _ in range(3)]
        assert [line_of(process.stdout) for process in processes] == ["ready\n"] * 3
        first, second, third = processes
        first.send_signal(signal.SIGSTOP)
        wait_until(lambda: "\nState:\tT" in Path(f"/proc/{first.pid}/status").read_text(), what="the signal")
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0.2)
        second.kill()
        third.send_signal(signal.SIGINT)
        first.send_signal(signal.SIGCONT)
        first.terminate()
        assert [process.wait(240) for process in processes] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT]
        assert [process.poll() for process in processes] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT]
        first.terminate()  # no signal is sent to a process that has ended


def line_of(output: IO[str] | None) -> str:
    assert output is not None
    with output:
        return output.readline()


def test_another_environment_of_third_party_packages_needs_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nothing.py").touch()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ended([sys.executable, str(tmp_path / "nothing.py")]) == (0, "", "", False)
