"""Requests that are built to do harm, against real processes: the answer, the gateway's memory, and how long it stood still.

    python -m benchmarks.hostile --json results.json

Each attack meets a gateway and verifiers of the shipped target that have just started. The pause is the longest time that a probe, which
asks `/health` again and again from another process, waited for its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.results import save
from benchmarks.services import free_port
from rootward import demo
from rootward.keys import digest, new_key

START_S, ANSWER_S, PROBE_S = 120.0, 60.0, 0.01
HEAD_S = 15.0  # after which half-sent heads are counted
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@dataclass
class Stand:
    """A gateway and its verifiers. `gateway` is its gRPC address, `http` the URL of the other."""

    processes: list[subprocess.Popen[bytes]]  # the gateway last
    gateway: str
    http: str

    @property
    def living_verifiers(self) -> int:
        return sum(process.poll() is None for process in self.processes[:-1])

    def memory(self, field: str) -> int:
        """Bytes of the gateway: VmRSS now, VmHWM at most so far."""
        status = Path(f"/proc/{self.processes[-1].pid}/status").read_text(encoding="utf-8")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{field}:"))) << 10


@asynccontextmanager
async def standing(num_verifiers: int, *flags: str) -> AsyncIterator[Stand]:
    async with AsyncExitStack() as stack:
        model, processes, ports = str(demo.paths().target), [], [free_port() for _ in range(num_verifiers + 2)]

        def start(*command: str) -> None:
            process = subprocess.Popen(
                [sys.executable, "-m", *command, "--model", model],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)

        *verifiers, gateway, http = (f"127.0.0.1:{port}" for port in ports)
        for address in verifiers:
            start("verifier_service", "--listen", address, "--num-threads", "1")
        listen = ("--listen", gateway, "--http-listen", http, "--verifiers", ",".join(verifiers))
        start("gateway", *listen, "--redispatch-wait-s", "3", *flags)
        stand = Stand(processes, gateway, f"http://{http}")
        async with asyncio.timeout(START_S):
            while not await ready(stand.http):
                await asyncio.sleep(0.2)
        yield stand


async def ready(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as web:
            return (await web.get(f"{url}/health", timeout=5)).status_code == 200
    except httpx.HTTPError:
        return False


def longest_pause(url: str, stop: str) -> float:
    """Seconds; ends when the file `stop` is gone. Runs in a process of its own."""
    longest = 0.0
    with httpx.Client(timeout=ANSWER_S) as web:
        while Path(stop).exists():
            began = time.perf_counter()
            try:
                web.get(f"{url}/health")
            except httpx.HTTPError:
                time.sleep(0.1)
                continue
            longest = max(longest, time.perf_counter() - began)
            time.sleep(PROBE_S)
    return longest


async def post(url: str, path: str, body: Any, **headers: str) -> str:
    """Status and the begin of the message."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(timeout=ANSWER_S) as web:
        try:
            answer = await web.post(url + path, content=content, headers={"content-type": "application/json"} | headers)
        except httpx.HTTPError as error:
            return type(error).__name__
    return str(answer.status_code)


# -- Attacks: each returns what was answered ---------------------------------------------------------------------------


def chain(length: int, key: str = "") -> dict[str, Any]:
    """A schema of so many definitions, each of which is the next one."""

    def link(i: int) -> dict[str, Any]:
        target = {"$ref": f"#/$defs/a{i + 1}"}
        return {key: [target] if key.endswith("Of") else target} if key else target

    links = {f"a{i}": link(i) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}}


def with_schema(schema: Any) -> Callable[[Stand], Awaitable[str]]:
    async def attack(stand: Stand) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        status = await post(stand.http, "/v1/chat/completions", CHAT | {"response_format": form})
        await asyncio.sleep(1.0)
        return f"{status}, {stand.living_verifiers} of 3 verifiers alive"

    return attack


async def large_messages_without_a_key(stand: Stand) -> str:
    options = [("grpc.max_send_message_length", -1)]
    message = b"\x12\x80\x80\x80\x1f" + bytes(62 << 20)  # token_ids, packed
    async with grpc.aio.insecure_channel(stand.gateway, options) as channel:
        detokenize = channel.unary_unary("/rootward.v1.Inference/Detokenize", bytes, bytes)

        async def one() -> str:
            try:
                await detokenize(message, timeout=ANSWER_S)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        return ", ".join(sorted(set(await asyncio.gather(*(one() for _ in range(4))))))


async def nested_arrays(stand: Stand) -> str:
    body = b'{"prompt":[' + b"[]," * ((31 << 20) // 3) + b"[]]}"
    return await post(stand.http, "/v1/completions", body)


async def half_heads(stand: Stand) -> str:
    host, port = stand.http.removeprefix("http://").split(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
    for _, writer in streams:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
    await asyncio.sleep(HEAD_S)

    async def ended(reader: asyncio.StreamReader) -> bool:
        try:
            await asyncio.wait_for(reader.read(), 0.5)
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    closed = sum(await asyncio.gather(*(ended(reader) for reader, _ in streams)))
    for _, writer in streams:
        writer.close()
    return f"{300 - closed} of 300 open after {HEAD_S:.0f} s"


async def long_texts(stand: Stand) -> str:
    text = "a b " * (3_600_000 // 4)
    calls = [asyncio.create_task(post(stand.http, "/tokenize", {"prompt": text})) for _ in range(4)]
    await asyncio.sleep(2.0)
    began = time.perf_counter()
    status = await post(stand.http, "/v1/chat/completions", CHAT)
    waited = time.perf_counter() - began
    answers = sorted(set(await asyncio.gather(*calls)))
    return f"{', '.join(answers)}; chat {status} after {waited:.1f} s"


async def many_choices(stand: Stand) -> str:
    """Three requests of one tenant take every place; a request of another waits."""
    greedy = {"prompt": [5, 6, 7], "max_tokens": 512, "n": 128, "temperature": 1.0}
    calls = [asyncio.create_task(post(stand.http, "/v1/completions", greedy)) for _ in range(3)]
    await asyncio.sleep(1.0)
    began = time.perf_counter()
    status = await post(stand.http, "/v1/chat/completions", CHAT)
    waited = time.perf_counter() - began
    for call in calls:
        if not call.done():
            call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    said = {"still running" if isinstance(a, BaseException) else str(a) for a in answers}
    return f"{', '.join(sorted(said))}; chat {status} after {waited:.1f} s"


async def web_page(stand: Stand) -> str:
    """Requests that a page of another site can send without a preflight, and by a host name that resolves to this machine."""
    simple = await post(
        stand.http, "/v1/completions", {"prompt": [5], "max_tokens": 1}, **{"content-type": "text/plain"}
    )
    rebound = await post(stand.http, "/v1/completions", {"prompt": [5], "max_tokens": 1}, host="evil.example")
    return f"{simple} as text/plain, {rebound} under another name"


async def drain(stand: Stand) -> str:
    async with grpc.aio.insecure_channel(stand.gateway) as channel:
        call = channel.unary_unary("/rootward.v1.Control/Drain", bytes, bytes)
        try:
            await call(b"", timeout=10)
            said = "OK"
        except grpc.aio.AioRpcError as error:
            said = error.code().name
    await asyncio.sleep(5.0)
    return f"{said}, process {'runs' if stand.processes[-1].poll() is None else 'has ended'} 5 s later"


ATTACKS: dict[str, tuple[int, Callable[[Stand], Awaitable[str]]]] = {
    "schema, chain of 3 000 references": (3, with_schema(chain(3_000))),
    "schema, chain of 3 000 allOf": (3, with_schema(chain(3_000, "allOf"))),
    "schema, chain of 3 000 items": (3, with_schema(chain(3_000, "items"))),
    "four Detokenize of 62 MiB without a key": (1, large_messages_without_a_key),
    "31 MiB of [[],[],…]": (1, nested_arrays),
    "300 half-sent heads": (1, half_heads),
    "four /tokenize of 3.6 MB, then a chat": (1, long_texts),
    "three requests of n = 128, then a chat": (1, many_choices),
    "a web page drives a gateway on loopback": (1, web_page),
    "Drain of a gateway": (1, drain),
}


async def measured(name: str) -> dict[str, Any]:
    num_verifiers, attack = ATTACKS[name]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1) as other:
        keys, stop = Path(folder) / "keys.yaml", Path(folder) / "probe"
        keys.write_text(f"keys:\n  - {{name: a, sha256: {digest(new_key())}}}\n", encoding="utf-8")
        stop.touch()
        flags = ["--api-keys", str(keys)] if "without a key" in name else []
        async with standing(num_verifiers, *flags) as stand:
            before = stand.memory("VmRSS")
            probe = asyncio.get_running_loop().run_in_executor(other, longest_pause, stand.http, str(stop))
            await asyncio.sleep(1.0)
            began = time.perf_counter()
            answer = await attack(stand)
            seconds = time.perf_counter() - began
            peak = stand.memory("VmHWM") if stand.processes[-1].poll() is None else before
            stop.unlink()
            pause = await probe
    return {
        "answer": answer,
        "seconds": round(seconds, 1),
        "memory_before_mib": before >> 20,
        "memory_peak_mib": peak >> 20,
        "longest_pause_s": round(pause, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name in given.attacks:
        results[name] = asyncio.run(measured(name))
        print(f"{name}: {results[name]}", flush=True)
        if given.json:
            save(given.json, {"attacks": results})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
