"""`rootward bench serve`: what it asks of guidellm, what it reads off its report, and how it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from support.processes import wait_until
from unit.gateway.service_for_tests import grpc_serving

from gateway.schemas import ChatRequest
from rootward import demo
from rootward.cli.bench_serve import Spread, read_report
from rootward.cli.main import main
from rootward.errors import ConfigurationError

REPORT = Path(__file__).resolve().parents[1] / "data" / "guidellm-0.8.json"  # of a run, without what nobody reads here
GUIDELLM = """#!{python}
import json, pathlib, shutil, sys
if "--version" in sys.argv:
    sys.exit(print("guidellm version: {version}"))
assert sys.argv[1:3] == ["run", "--config"]
config = json.loads(pathlib.Path(sys.argv[3]).read_text())
rows = pathlib.Path(config["spec"]["data"][0]["path"]).read_text().splitlines()
asked = dict(config=config, arguments=sys.argv, prompts=[json.loads(row)["prompt"] for row in rows])
pathlib.Path({asked!r}).write_text(json.dumps(asked))
shutil.copy({report!r}, config["spec"]["outputs"][0]["path"])
sys.exit({code})
"""


class Gateway(BaseHTTPRequestHandler):
    """Serves two models to the key `secret`."""

    def do_GET(self) -> None:
        known = self.headers["authorization"] == "Bearer secret" and self.path == "/v1/models"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def program(folder: Path, *, version: str = "0.8.1", code: int = 0, report: Path = REPORT) -> str:
    file, asked = folder / "guidellm", str(folder / "asked.json")
    file.write_text(GUIDELLM.format(python=sys.executable, version=version, asked=asked, report=str(report), code=code))
    file.chmod(0o755)
    return str(file)


def test_asks_guidellm_for_each_load_and_keeps_the_key_off_the_command_line(url, tmp_path, capsys) -> None:
    flags = ["--streams", "1,4", "--seconds", "7", "--max-tokens", "24", "--temperature", "0", "--no-speculation"]
    access = ["--url", url, "--api-key", "secret", "--guidellm", program(tmp_path)]
    assert main(["bench", "serve", *access, *flags, "--output", "json"]) == 0
    asked = json.loads((tmp_path / "asked.json").read_text())
    spec, backend = asked["config"]["spec"], asked["config"]["spec"]["backend"]
    assert spec["profile"] == {"kind": "concurrent"}
    assert asked["config"]["benchmarks"] == [{"profile.streams": 1}, {"profile.streams": 4}]
    assert spec["constraints"] == [{"kind": "max_duration", "seconds": 7}]
    assert (backend["target"], backend["model"], backend["max_tokens"]) == (url, "first", 24)
    assert (backend["request_format"], backend["api_key"]) == ("/v1/chat/completions", "secret")
    assert not any("secret" in word for word in asked["arguments"])
    ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **backend["extras"]["body"]})
    assert backend["extras"]["body"] == {"temperature": 0, "speculation": "disabled"}
    assert len(asked["prompts"]) == 7000  # more than a gateway answers in 7 s
    assert set(asked["prompts"]) == set(demo.chats())
    assert [point["load"] for point in json.loads(capsys.readouterr().out)] == ["1 stream", "4 streams"]


def test_takes_prompts_rates_and_the_name_of_a_model(url, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    flags = ["--profile", "poisson", "--rate", "0.5,2", "--model", "second", "--raw", "--seconds", "1"]
    access = ["--url", f"{url}/v1/", "--api-key", "secret", "--guidellm", program(tmp_path)]
    assert main(["bench", "serve", *access, *flags, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["config"]["benchmarks"] == [{"profile.rate": 0.5}, {"profile.rate": 2.0}]
    assert asked["config"]["spec"]["backend"]["model"] == "second"
    assert asked["config"]["spec"]["backend"]["request_format"] == "/v1/completions"
    assert asked["prompts"][:3] == ["one", "two", "one"]


SLOW_GUIDELLM = """#!{python}
import json, os, pathlib, subprocess, sys, time
if "--version" in sys.argv:
    sys.exit(print("guidellm version: 0.8.1"))
started = pathlib.Path({started!r})
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(120)"
worker = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
worker.stdout.readline()
started.with_suffix(".new").write_text(json.dumps([os.getpid(), worker.pid, sys.argv[3]]))
started.with_suffix(".new").rename(started)
time.sleep(120)
"""


# A shell that starts the tests in the background has them ignore SIGINT.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from rootward.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_guidellm_with_its_workers_and_remove_the_file_with_the_key(number, url, tmp_path) -> None:
    file, started, temporary = tmp_path / "guidellm", tmp_path / "started.json", tmp_path / "temporary"
    file.write_text(SLOW_GUIDELLM.format(python=sys.executable, started=str(started)))
    file.chmod(0o755)
    temporary.mkdir()
    command = [sys.executable, "-c", INTERRUPTIBLE, "bench", "serve", "--url", url, "--api-key", "secret"]
    with subprocess.Popen(
        [*command, "--guidellm", str(file)], env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE
    ) as running:
        wait_until(started.exists)
        pid, worker, config = json.loads(started.read_text())
        assert "secret" in Path(config).read_text()
        running.send_signal(number)
        running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("profile", ["synchronous", "throughput", "sweep"])
def test_profiles_that_find_their_loads_run_once(profile, url, tmp_path) -> None:
    access = ["--url", url, "--api-key", "secret", "--guidellm", program(tmp_path)]
    assert main(["bench", "serve", *access, "--profile", profile, "--seconds", "1"]) == 0
    asked = json.loads((tmp_path / "asked.json").read_text())
    most = {} if profile == "synchronous" else {"max_concurrency": 512}
    assert asked["config"]["spec"]["profile"] == {"kind": profile, **most}
    assert asked["config"]["benchmarks"] == [None]


def test_writes_report_table_and_plot(url, tmp_path, capsys) -> None:
    out = tmp_path / "new" / "out"
    access = ["--url", url, "--api-key", "secret", "--guidellm", program(tmp_path)]
    assert main(["bench", "serve", *access, "--seconds", "1", "--out", str(out)]) == 0
    assert json.loads((out / "report.json").read_text()) == json.loads(REPORT.read_text())
    assert (
        "| 4 streams | 113 | 0 | 22.60 | 546.0 | 53 / 218 | 3.8 / 7.3 | 0.15 / 0.34 |" in (out / "table.md").read_text()
    )
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("4 streams", "546.0", "53 / 218"))


def test_a_run_in_which_nothing_succeeded_has_no_times_and_exit_code_4(url, tmp_path, capsys) -> None:
    report = json.loads(REPORT.read_text())
    for run in report["benchmarks"]:
        run["metrics"]["request_totals"] |= {"successful": 0, "errored": 5, "total": 5}
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency"):
            run["metrics"][name]["successful"] |= {"median": 0.0, "percentiles": None}
    assert read_report(report)[0].first_token_ms == Spread(None, None)
    failed = tmp_path / "failed.json"
    failed.write_text(json.dumps(report))
    access = ["--url", url, "--api-key", "secret", "--guidellm", program(tmp_path, report=failed)]
    assert main(["bench", "serve", *access, "--seconds", "1", "--out", str(tmp_path)]) == 4
    printed = capsys.readouterr()
    assert "- / -" in printed.out
    assert "no request succeeded" in printed.err


def test_refuses_what_it_cannot_run_before_it_runs(url, tmp_path, monkeypatch, capsys) -> None:
    known = ["--guidellm", program(tmp_path)]
    reached = [*known, "--url", url, "--api-key", "secret"]
    for flags, code, words in (
        (["--guidellm", "no-such-program"], 2, "pipx install 'guidellm==0.8.*'"),
        ([*known, "--url", "http://127.0.0.1:1"], 4, "rootward serve all"),
        ([*known, "--url", "grpc://127.0.0.1:50051"], 2, "--http-listen"),
        ([*known, "--url", url, "--api-key", "wrong"], 2, "401"),
        ([*reached, "--model", "third"], 2, "use one of first, second"),
        ([*reached, "--profile", "constant"], 2, "--rate: --profile constant needs requests per second"),
        ([*reached, "--rate", "2"], 2, "--rate: has no meaning with --profile concurrent"),
        ([*reached, "--profile", "sweep", "--streams", "2"], 2, "--streams: has no meaning with --profile sweep"),
        ([*reached, "--streams", "0"], 2, "use whole numbers above 0"),
        ([*reached, "--profile", "poisson", "--rate", "nan"], 2, "use numbers above 0"),
        ([*reached, "--prompts", str(tmp_path / "none.txt")], 2, "--prompts"),
    ):
        assert main(["bench", "serve", *flags]) == code, flags
        assert words in capsys.readouterr().err
    monkeypatch.setattr("rootward.cli.bench_serve.find_spec", lambda name: None)
    assert main(["bench", "serve", *reached, "--out", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "asked.json").exists()


async def test_refuses_the_grpc_address_of_a_gateway(tmp_path, capsys) -> None:
    """The one that all other commands take."""
    async with grpc_serving() as (_, address):
        words = ["bench", "serve", "--guidellm", program(tmp_path), "--url", address]
        assert await asyncio.to_thread(main, words) == 2
    assert "--http-listen" in capsys.readouterr().err


def test_refuses_a_guidellm_of_another_version_and_one_that_fails(url, tmp_path, capsys) -> None:
    access = ["--url", url, "--api-key", "secret"]
    assert main(["bench", "serve", *access, "--guidellm", program(tmp_path, version="0.5.4")]) == 2
    assert "has version 0.5.4, not 0.8" in capsys.readouterr().err
    assert main(["bench", "serve", *access, "--guidellm", program(tmp_path, code=3), "--seconds", "1"]) == 1
    assert "ended with exit code 3" in capsys.readouterr().err


def test_a_load_is_named_by_its_streams_or_its_rate() -> None:
    report = json.loads(REPORT.read_text())
    strategies = [{"type_": "poisson", "rate": 2.5}, {"type_": "throughput", "max_concurrency": 512}]
    for run, strategy in zip(report["benchmarks"], strategies, strict=True):
        run["config"]["strategy"] = strategy
    assert [point.load for point in read_report(report)] == ["2.5/s", "throughput"]


def test_refuses_a_report_of_another_form() -> None:
    with pytest.raises(ConfigurationError, match="has no 'benchmarks'"):
        read_report({})
