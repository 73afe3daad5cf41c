"""`serve all`: real processes with a real Redis on loopback, killed in mid-stream, stopped cleanly."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import grpc
import httpx
import pytest
import pytest_asyncio
import redis.asyncio
from support.certificates import Authority, spiffe
from support.processes import wait_until

from gateway.local import serve_all
from gateway.settings import LocalSettings
from rootward import AsyncClient, AuthenticationError, BadRequestError, SamplingParams
from rootward.core.requests import SpeculationStats
from rootward.keys import digest, new_key

pytestmark = [pytest.mark.services, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

MODEL = "tabular:vocab=40,seed=1,sharpness=2"
DRAFT = "tabular:vocab=40,seed=1,sharpness=2,noise=0.7"
LONG = SamplingParams(temperature=1, max_tokens=1200, seed=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment():
    settings = LocalSettings(
        model=MODEL,
        draft_model=DRAFT,
        served_model_name="table",
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        shutdown_timeout_s=5.0,
        gateway_flags="--redispatch-wait-s 60",
    )
    async with serve_all(settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(deployment):
    async with AsyncClient(deployment.address) as client:
        return (await client.generate("1 2 3", sampling=LONG)).token_ids


async def killed_in_mid_stream(deployment, child, number):
    """What a client gets when a process is killed after some tokens."""
    async with AsyncClient(deployment.address) as client:
        tokens, pid = [], child.pid
        assert pid
        stream = client.stream("1 2 3", sampling=LONG, request_id=f"kill-{child.role}-{number}")
        async for delta in stream:
            assert delta.offset == len(tokens)
            tokens += delta.token_ids
            if len(tokens) > 100 * number and pid:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        assert not pid
        return tuple(tokens), await stream.get_final_result()


async def all_ready(deployment):
    """Without a limit of its own: how long a start takes depends on what else the machine does."""
    for child in deployment.children:
        await child.ready.wait()


async def test_both_faces_answer(deployment):
    async with AsyncClient(deployment.address) as client, httpx.AsyncClient(base_url=deployment.url) as web:
        result = await client.generate("1 2 3", sampling=SamplingParams(max_tokens=400))
        assert len(result.token_ids) == len(result.accepted) == 400
        assert result.text == "".join(f"{t} " for t in result.token_ids)
        body = {"prompt": [1, 2, 3], "max_tokens": 50, "seed": 4, "return_token_ids": True, "speculation": True}
        first, again = [(await web.post("/v1/completions", json=body)).json() for _ in range(2)]
        assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
        assert (await web.get("/health")).status_code == 200
        async with asyncio.timeout(60):  # what the gateway lists is up to a second old
            while not (info := await client.server_info()).drafters:
                await asyncio.sleep(0.05)
        assert ([m.name for m in info.models], len(info.drafters)) == (["table"], 1)


async def test_the_record_of_a_request_is_in_redis(deployment):
    async with (
        AsyncClient(deployment.address) as client,
        redis.asyncio.Redis.from_url(f"redis://{deployment.redis.address}", decode_responses=True) as store,
    ):
        params = SamplingParams(max_tokens=50)
        result = await client.generate("1 2 3", sampling=params, request_id="kept", session_id="talk")
        async with asyncio.timeout(60):  # the ledger pauses for up to a second where the store answers slowly
            while await store.hget("rw:req:{kept}", "state") != "finished":
                await asyncio.sleep(0.05)
        log = [json.loads(item)["t"] for item in await store.lrange("rw:req:{kept}:log", 0, -1)]
        assert [token for tokens in log for token in tokens] == list(result.token_ids)
        assert not await store.exists("rw:req:{kept}:lease")


@pytest.mark.parametrize("number", [1, 4])
async def test_a_killed_verifier_loses_and_repeats_no_token(deployment, undisturbed, number):
    tokens, result = await killed_in_mid_stream(deployment, deployment.verifier, number)
    assert tokens == undisturbed == result.token_ids
    await all_ready(deployment)


async def test_a_killed_drafter_changes_nothing_and_comes_back(deployment, undisturbed):
    tokens, _ = await killed_in_mid_stream(deployment, deployment.drafters[0], 2)
    assert tokens == undisturbed
    async with AsyncClient(deployment.address) as client:
        stats = SpeculationStats()
        # What the gateway lists is up to a second old, and a generation may end before a new process has drafted for it.
        while stats.drafter != deployment.drafters[0].address or not stats.num_accepted_draft_tokens:
            with suppress(BadRequestError):  # it is not connected again yet
                result = await client.generate("1 2 3", sampling=SamplingParams(max_tokens=400), speculation="required")
                stats = result.speculation


async def test_a_killed_redis_stops_no_request(deployment, undisturbed):
    tokens, _ = await killed_in_mid_stream(deployment, deployment.redis, 3)
    assert tokens == undisturbed
    await all_ready(deployment)


async def test_sixteen_streams_each_get_their_own(deployment, undisturbed):
    async with AsyncClient(deployment.address) as client:
        params = [SamplingParams(max_tokens=80, seed=i) for i in range(8)] * 2
        results = await asyncio.gather(*(client.generate("1 2 3", sampling=p) for p in params))
        assert all(a.token_ids == b.token_ids for a, b in zip(results[:8], results[8:], strict=True))
        assert len({r.token_ids for r in results}) == 8
        load = await client.load()
        assert (load.num_running, load.num_waiting) == (0, 0)


def local(*flags):
    command = [sys.executable, "-m", "gateway.local", "--model", MODEL, "--draft-model", DRAFT]
    listen = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    return [*command, *listen, *flags]


async def test_a_stop_is_clean_and_complete():
    def stopped():
        process = subprocess.Popen(local(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines = []
        while not lines or "all listening" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended before it was ready"
        assert [line.split()[1] for line in lines] == ["redis", "drafter", "verifier", "gateway", "all"]
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
        assert len(children.split()) == 5  # and the guard
        process.terminate()
        assert process.wait(60) == 0
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children.split()), what="the processes")

    await asyncio.to_thread(stopped)


def with_gateway_flags(flags):
    return LocalSettings(
        model=MODEL,
        draft_model=DRAFT,
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        redis_url="none",
        gateway_flags=flags,
    )


async def test_it_starts_with_a_gateway_that_asks_for_api_keys(tmp_path):
    key, file = new_key(), tmp_path / "keys.yaml"
    file.write_text(f"keys:\n  - {{name: one, sha256: {digest(key)}}}\n", encoding="utf-8")
    async with serve_all(with_gateway_flags(f"--api-keys {file}")) as running:
        async with AsyncClient(running.address, api_key=key) as client:
            first = await client.generate("1 2 3", sampling=SamplingParams(max_tokens=4), speculation="required")
            assert len(first.token_ids) == 4
        async with AsyncClient(running.address) as client:
            with pytest.raises(AuthenticationError):
                await client.generate("1 2 3")


def descendants(process):
    """Process ids of the children of a process, and of theirs."""
    found, level = [], [process.pid]
    while level:
        pattern = ",".join(map(str, level))
        listed = subprocess.run(["pgrep", "-P", pattern], capture_output=True, text=True, check=False).stdout
        level = [int(pid) for pid in listed.split()]
        found += level
    return found


async def ends_with_its_children(command, number):
    """The exit code of what prints "all listening" and then gets this signal. AssertionError if a process is left."""

    def ended():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while "all listening" not in (line := process.stdout.readline()):
            assert line, "it ended before it was ready"
        children = descendants(process)
        assert len(children) >= 4
        process.send_signal(number)
        code = process.wait(60)
        try:
            wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), what="the processes")
        finally:
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return code

    return await asyncio.to_thread(ended)


async def test_a_closed_terminal_leaves_no_process():
    """Its SIGHUP reaches the supervisor alone, because the services have sessions of their own."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, and processes inherit that
    try:
        assert await ends_with_its_children(local(), signal.SIGHUP) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_nohup_keeps_the_services_running_without_a_terminal():
    def survives():
        process = subprocess.Popen(
            ["nohup", *local("--redis-url", "none")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        while "all listening" not in (line := process.stdout.readline()):
            assert line, "it ended before it was ready"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.terminate()
        assert process.wait(60) == 0

    await asyncio.to_thread(survives)


async def test_a_killed_supervisor_leaves_no_process():
    assert await ends_with_its_children(local(), signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_command_that_started_services_ends_them_when_it_is_ended(number):
    """As `rootward check` and `rootward plan` do."""
    program = (
        "import time\n"
        "from rootward.cli.serve import services_running\n"
        f"with services_running({['--model', MODEL, '--draft-model', DRAFT]!r}, start_timeout_s=200) as lines:\n"
        "    print(lines[-1], flush=True)\n"
        "    time.sleep(120)\n"
    )
    code = await ends_with_its_children([sys.executable, "-c", program], number)
    assert code == (128 + number if number == signal.SIGTERM else -number)


@pytest.mark.parametrize("asked", ["", f" --tls-peers {spiffe('client')}"], ids=["tls", "mutual"])
async def test_it_starts_with_a_gateway_that_speaks_tls(tmp_path, asked):
    """Also where it refuses callers without a certificate, such as the supervisor."""
    files = Authority(tmp_path).issue("gateway")
    tls_flags = f"--tls-certificate {files.certificate} --tls-key {files.key} --tls-authority {files.authority}{asked}"
    async with serve_all(with_gateway_flags(tls_flags)) as running:
        assert running.url.startswith("https://")
        if not asked:
            tls = grpc.ssl_channel_credentials(files.authority.read_bytes())
            async with AsyncClient(running.address, tls=tls) as client:
                five = SamplingParams(max_tokens=5)
                assert (await client.generate("1 2 3", sampling=five, speculation="required")).token_ids


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--gateway-flags=--max-num-seqs '8"], 2, 'rootward all: gateway_flags: "--max-num-seqs \'8": No closing'),
        (["--model", "/nowhere"], 2, "model: '/nowhere' is not a folder"),
        (["--model", "nobody/no-such-model"], 2, "tokenizer: none at 'nobody/no-such-model' (We couldn't connect"),
        (["--redis-url", "redis://me:p/w@127.0.0.1:1/0"], 2, "redis_url: 'redis://…' is no Redis URL"),
        (["--verifier-flags=--nope"], 2, "rootward verifier: --nope: unknown flag"),
        (["--nope"], 2, "rootward all: --nope: unknown flag"),
    ],
)
async def test_what_cannot_start_ends_with_one_line_and_its_code(flags, code, words):
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = await asyncio.to_thread(
        subprocess.run, local(*flags), env=offline, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--listen", "--http-listen"])
async def test_a_port_in_use(flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "gateway", "--model", MODEL, flag, address]
        other = "--http-listen" if flag == "--listen" else "--listen"
        done = await asyncio.to_thread(
            subprocess.run, [*command, other, "127.0.0.1:0"], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 2
    assert address in done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("rootward")]  # gRPC adds a line of its own
    assert len(ours) == 1
    assert "Traceback" not in done.stderr
