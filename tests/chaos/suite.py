"""Failures on purpose, and long load: `make chaos MINUTES=30` and `make soak MINUTES=60 STREAMS=200`.

Two gateways, three verifiers, three drafters and a Redis as processes, linked through proxies. Streams run all the time; every text that is
a function of the target and the seed is compared token by token with that of an undisturbed run. `docs/promises.md` says what is promised
and which test shows it. Exit code 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import redis
from support.entry import DEADLY
from support.malformed_frames import FrameCorruptor, corrupting_drafter
from support.processes import Service, free_port
from support.redis import RedisProcess

from benchmarks.slow_link import Conditions, SlowLink
from rootward import AsyncClient, SamplingParams, Speculation
from rootward.errors import APIError, BadRequestError
from rootward.wire.clients import RemoteDrafter

TARGET = "tabular:vocab=40,seed=1,sharpness=2"
ENTRY = Path(__file__).parents[1] / "support" / "entry.py"
NUM_TOKENS, NUM_SEEDS = 200, 4
PROMPT = [1, 2, 3]
RECOVERY_S = 90.0  # in which streams must go on after a failure
REST_S = 120.0  # in which everything must be given back
SAMPLE_S = 2.0
WARM_SHARE = 0.3  # of a run, after which memory is compared
GROWTH = 1.25  # of a process's memory from then on at most, and
GROWTH_BYTES = 32 << 20
KINDS = ("coupled", "greedy", "traversal")
GREEDY = NUM_SEEDS  # key of the greedy text


@dataclass(frozen=True, slots=True)
class Models:
    """target: of verifiers and gateways; drafter, verifier: options of these services."""

    target: str
    drafter: tuple[str, ...]
    verifier: tuple[str, ...] = ()


TABLES = Models(TARGET, ("--model", f"{TARGET},noise=0.4,noise_seed=1"))


def with_a_head(folder: Path) -> Models:
    """A random network, and drafters with a random head for it."""
    from support.heads import eagle3
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from unit.engine.networks import VOCAB, tiny

    network = tiny("LlamaConfig", num_hidden_layers=6, max_position_embeddings=512)
    network.generation_config.eos_token_id = None  # every text has its full length
    network.config.eos_token_id = None
    network.save_pretrained(folder / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "target")
    head = str(eagle3(folder / "head", network, draft_ids=None, scale=0.5))
    target = str(folder / "target")
    return Models(target, ("--model", f"head:{head}", "--target", target), ("--draft-head", head))


@dataclass
class Stand:
    """The system under test."""

    seed: int
    redis: RedisProcess
    services: dict[str, Service]  # by name: role and number
    links: list[SlowLink]
    corruptor: FrameCorruptor
    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    restarts: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)  # streams by kind
    interrupted: int = 0  # sampled streams that lost their gateway: the client is told how far it was
    broken: list[str] = field(default_factory=list)  # promises
    events: list[tuple[float, str, float, float]] = field(default_factory=list)  # at, failure, recovery, longest pause
    samples: list[dict[str, float]] = field(default_factory=list)
    longest_pause_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def of(self, role: str) -> list[str]:
        return sorted(name for name in self.services if name.startswith(role))

    @property
    def target(self) -> str:
        return ",".join(self.services[name].address for name in self.of("gateway"))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def all_up(self) -> bool:
        return not self.starting and all(s.process and s.process.poll() is None for s in self.services.values())

    def signal(self, name: str, number: int) -> None:
        process = self.services[name].process
        assert process is not None
        process.send_signal(number)

    async def supervise(self) -> None:
        """Start again what has ended, as Kubernetes would."""
        while True:
            for name, service in self.services.items():
                assert service.process is not None
                if service.process.poll() is not None:
                    self.restarts[name] += 1
                    self.starting.add(name)
                    await asyncio.to_thread(service.start)
                    self.starting.discard(name)
            await asyncio.sleep(0.1)

    async def sample(self) -> None:
        with redis.Redis(port=self.redis.port, socket_timeout=0.5) as client:
            while True:
                now = {"at": self.elapsed_s, "streams": float(self.done.total())}
                for name, service in self.services.items():
                    now |= {f"{kind}/{name}": value for kind, value in usage(service).items()}
                try:
                    now["keys"] = float(await asyncio.to_thread(client.dbsize))
                    now["redis"] = float((await asyncio.to_thread(client.info, "memory"))["used_memory"])
                except redis.RedisError:  # it is away at the moment
                    pass
                self.samples.append(now)
                await asyncio.sleep(SAMPLE_S)

    async def metrics(self, name: str) -> dict[str, float]:
        """Samples of its admin port, without labels summed up."""
        port = self.services[name].command[self.services[name].command.index("--admin-listen") + 1]
        async with httpx.AsyncClient() as web:
            text = (await web.get(f"http://{port}/metrics", timeout=10)).text
        found: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                key, _, value = line.rpartition(" ")
                found[key.partition("{")[0]] = found.get(key.partition("{")[0], 0.0) + float(value)
        return found


def usage(service: Service) -> dict[str, float]:
    """Resident bytes and open files of its process; nothing while it is down."""
    assert service.process is not None
    folder = Path("/proc") / str(service.process.pid)
    try:
        resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"memory": float(resident), "files": float(len(os.listdir(folder / "fd")))}
    except (OSError, IndexError):
        return {}


def service(module: str, *flags: object) -> Service:
    made = Service(module)
    own = ["--listen", f"127.0.0.1:{free_port()}", "--admin-listen", f"127.0.0.1:{free_port()}"]
    made.command = [sys.executable, *map(str, ([ENTRY, module] if module != "dishonest" else DISHONEST)), *own]
    made.command += map(str, flags)
    return made


DISHONEST = ["-m", "benchmarks.dishonest", "--cheat", "argmax"]


@asynccontextmanager
async def standing(seed: int, *, models: Models, dishonest: bool, streams: int) -> AsyncIterator[Stand]:
    os.environ.setdefault("ROOTWARD_NUM_THREADS", "1")
    async with AsyncExitStack() as stack:
        store = stack.enter_context(RedisProcess())
        services: dict[str, Service] = {}
        links: list[SlowLink] = []

        async def add(name: str, made: Service) -> str:
            """Address of a link to it."""
            services[name] = await asyncio.to_thread(stack.enter_context, made)
            links.append(await stack.enter_async_context(SlowLink(made.address, seed=len(links))))
            return links[-1].address

        async def all_of(*made: tuple[str, Service]) -> list[str]:
            """Addresses of links to them; they start together."""
            return await asyncio.gather(*(add(name, one) for name, one in made))

        quick = ("--shutdown-timeout-s", "0.5")
        common = ("--redis-url", store.url, *quick)
        honest = [(f"drafter{i}", service("drafter_service", *models.drafter, *quick)) for i in range(2)]
        cheating = [("drafter2", service("dishonest", *models.drafter, *quick))] if dishonest else []
        drafters = await all_of(*honest, *cheating)
        corruptor = FrameCorruptor(seed, most=0)
        remote = await stack.enter_async_context(RemoteDrafter(services["drafter1"].address))
        drafters[1] = await stack.enter_async_context(corrupting_drafter(remote, corruptor))
        flags = ("--model", models.target, "--drafters", ",".join(drafters), "--max-num-seqs", 64, *common)
        flags += (*models.verifier, "--num-ahead-tokens", 32)  # as for drafters on other machines
        verifiers = await all_of(*((f"verifier{i}", service("verifier_service", *flags)) for i in range(3)))
        limits = ("--max-num-seqs", max(256, streams), "--redispatch-wait-s", 120, "--http-listen", "127.0.0.1:0")
        flags = ("--model", models.target, "--verifiers", ",".join(verifiers), *limits, *common)
        await all_of(*((f"gateway{i}", service("gateway", *flags)) for i in range(2)))
        made = Stand(seed, store, services, links, corruptor)
        async with AsyncClient(made.target, timeout=60.0) as client:
            for key in range(NUM_SEEDS + 1):
                made.expected[key] = (await client.generate(PROMPT, sampling=params(key))).token_ids
        tasks = [asyncio.create_task(made.supervise()), asyncio.create_task(made.sample())]
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def params(key: int) -> SamplingParams:
    if key == GREEDY:
        return SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    return SamplingParams(max_tokens=NUM_TOKENS, seed=key)


async def one_stream(stand: Stand, client: AsyncClient, number: int) -> None:
    kind = KINDS[number % len(KINDS)]
    key = {"coupled": number % NUM_SEEDS, "greedy": GREEDY}.get(kind)
    sampling = SamplingParams(max_tokens=NUM_TOKENS) if key is None else params(key)
    mode = "required" if number % 2 else "auto"
    wish = Speculation(mode=mode, verification="traversal" if key is None else None)
    tokens: list[int] = []
    last = time.monotonic()
    try:
        stream = client.stream(PROMPT, sampling=sampling, speculation=wish)
        async for delta in stream:
            now = time.monotonic()
            stand.longest_pause_s, last = max(stand.longest_pause_s, now - last), now
            if delta.offset != len(tokens):
                stand.broken.append(f"{kind}: offset {delta.offset} after {len(tokens)} tokens")
            tokens += delta.token_ids
    except BadRequestError as error:
        if mode != "required" or "drafter" not in str(error):  # required drafts, and no drafter up
            stand.broken.append(f"{kind}: {error}")
        await asyncio.sleep(0.1)
        return
    except APIError as error:
        if key is None and error.code == "STREAM_INTERRUPTED":
            stand.interrupted += 1
            return
        stand.broken.append(f"{kind}: {type(error).__name__} {error}")
        return
    if len(tokens) != NUM_TOKENS or (key is not None and tuple(tokens) != stand.expected[key]):
        stand.broken.append(f"{kind}: another text than undisturbed, {len(tokens)} tokens")
    stand.done[kind] += 1


@asynccontextmanager
async def load(stand: Stand, streams: int) -> AsyncIterator[None]:
    """Streams that begin anew as they end; leaving it lets the running ones end."""
    over = asyncio.Event()

    async def again_and_again(number: int, client: AsyncClient) -> None:
        while not over.is_set():
            await one_stream(stand, client, number)
            number += streams

    async with AsyncClient(stand.target, timeout=300.0, max_retries=12) as client, asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(again_and_again(number, client))
        yield
        over.set()


async def until(condition: Callable[[], object], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


# -- Failures -----------------------------------------------------------------------------------------------------------


class Failures:
    def __init__(self, stand: Stand) -> None:
        self.stand, self.random, self.poisons = stand, random.Random(stand.seed), 0

    def all(self) -> dict[str, Callable[[], Awaitable[None]]]:
        roles = {
            f"{name} a {role}": lambda act=act, role=role: act(self.any(role))
            for role in ("gateway", "verifier", "drafter")
            for name, act in (("kill", self.kill), ("stop", self.stop), ("drain", self.drain))
        }
        return roles | {
            "partition": self.partition,
            "slow links": self.slow_links,
            "clocks jump by an hour": self.jump,
            "Redis stopped": self.redis_stopped,
            "Redis killed, empty afterwards": self.redis_killed,
            "corrupt frames": self.corrupt,
            "poison request": self.poison,
        }

    def any(self, role: str) -> str:
        return self.random.choice(self.stand.of(role))

    async def kill(self, name: str) -> None:
        await self.end(name, signal.SIGKILL)

    async def end(self, name: str, number: int) -> None:
        process = self.stand.services[name].process
        assert process is not None
        process.send_signal(number)
        await until(lambda: process.poll() is not None, RECOVERY_S)

    async def stop(self, name: str) -> None:
        self.stand.signal(name, signal.SIGSTOP)
        await asyncio.sleep(self.random.uniform(0.5, 4.0))
        self.stand.signal(name, signal.SIGCONT)

    async def drain(self, name: str) -> None:
        await self.end(name, signal.SIGTERM)

    async def partition(self) -> None:
        for link in self.random.sample(self.stand.links, 3):
            await link.cut()

    async def slow_links(self) -> None:
        usual = Conditions()
        for link in self.stand.links:
            link.conditions = Conditions(delay_s=0.03, jitter_s=0.02, loss=0.02)
        await asyncio.sleep(4.0)
        for link in self.stand.links:
            link.conditions = usual

    async def jump(self) -> None:
        for role in ("gateway", "verifier", "drafter0", "drafter1"):
            for name in self.stand.of(role):
                self.stand.signal(name, signal.SIGUSR1)

    async def redis_stopped(self) -> None:
        self.stand.redis.signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)
        self.stand.redis.signal(signal.SIGCONT)

    async def redis_killed(self) -> None:
        self.stand.redis.kill()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(self.stand.redis.start)

    async def corrupt(self) -> None:
        self.stand.corruptor.most = self.stand.corruptor.num_sent + 300
        await until(lambda: self.stand.corruptor.over, 8.0)
        self.stand.corruptor.most = 0

    async def poison(self) -> None:
        """Two verifiers die of it, at whichever gateways it is sent, and no third."""
        stand, before = self.stand, sum(self.stand.restarts[name] for name in self.stand.of("verifier"))
        self.poisons += 1
        body = {"prompt": [*DEADLY, self.poisons], "max_tokens": 5}
        for name in (*stand.of("gateway"), *stand.of("gateway")):
            async with httpx.AsyncClient(timeout=90) as web:
                answer = await web.post(f"{stand.services[name].http}/v1/completions", json=body)
            if answer.status_code != 400 or "verifiers died" not in answer.text:
                stand.broken.append(f"poison request: {answer.status_code} {answer.text[:200]}")
        await asyncio.sleep(0.3)
        died = sum(stand.restarts[name] for name in stand.of("verifier")) - before
        if died > 2:
            stand.broken.append(f"poison request: {died} verifiers died of it")


async def fail_again_and_again(stand: Stand, minutes: float) -> None:
    """Each failure once before any comes twice, in an order drawn from the seed."""
    failures = Failures(stand)
    kinds: list[str] = []
    while stand.elapsed_s < 60 * minutes:
        if not kinds:
            kinds = list(failures.all())
            failures.random.shuffle(kinds)
        kind = kinds.pop()
        at, stand.longest_pause_s, began, before = stand.elapsed_s, 0.0, time.monotonic(), stand.done.total()
        await failures.all()[kind]()
        all_up = await until(lambda: stand.all_up, RECOVERY_S)
        goes_on = await until(lambda: stand.done.total() >= before + len(KINDS), RECOVERY_S)  # noqa: B023
        recovery_s = time.monotonic() - began
        if not (all_up and goes_on):
            stand.broken.append(f"{kind}: no progress within {RECOVERY_S:.0f} s")
        await asyncio.sleep(failures.random.uniform(0.5, 2.0))
        stand.events.append((at, kind, recovery_s, stand.longest_pause_s))
        print(f"{at:7.1f} s  {kind}: streams went on after {recovery_s:.1f} s", flush=True)


# -- At the end ---------------------------------------------------------------------------------------------------------


async def check_rest(stand: Stand) -> dict[str, float]:
    """What is still held once nothing runs; all of it must be 0."""
    wanted = {
        "verifier": ("rootward_num_requests_running", "rootward_num_requests_waiting", "rootward_kv_cache_usage_ratio"),
        "gateway": ("rootward_num_requests_running", "rootward_num_requests_waiting"),
        "drafter": ("rootward_drafter_sessions_open",),
    }
    held: dict[str, float] = {}
    end = time.monotonic() + REST_S
    while time.monotonic() < end:
        held = {}
        for role, names in wanted.items():
            for name in stand.of(role):
                found = await stand.metrics(name)
                held |= {f"{name} {metric}": found[metric] for metric in names}
        with redis.Redis(port=stand.redis.port) as client:
            leases = client.scan_iter("rw:req:*:lease")
            held["Redis leases"] = float(sum(1 for _ in leases))
            no_end = [key for key in client.scan_iter() if client.ttl(key) == -1]
        held["Redis keys without an end"] = float(sum(not key.startswith(b"rw:workers:") for key in no_end))
        if not any(held.values()):
            break
        await asyncio.sleep(1.0)
    stand.broken += [f"at rest: {name} is {value:g}" for name, value in held.items() if value]
    return held


async def check_dishonest(stand: Stand, seconds: float = 90.0) -> None:
    """Every verifier that runs now knows that the third drafter cheats, whatever was killed since.

    The audit needs a number of draws, not a time: how long they take is a matter of the processor.
    """
    until = time.monotonic() + seconds
    while True:
        caught = [
            (await stand.metrics(name)).get("rootward_drafter_audit_caught", 0.0) for name in stand.of("verifier")
        ]
        if min(caught) == 1.0:
            return
        if time.monotonic() > until:
            break
        await asyncio.sleep(1.0)
    stand.broken.append(f"dishonest drafter: caught by {sum(caught):g} of {len(caught)} verifiers")


def check_growth(stand: Stand) -> dict[str, tuple[float, float, float]]:
    """(after warming up, at the end, slope per hour) of memory and files of each process that was never restarted."""
    rows: dict[str, tuple[float, float, float]] = {}
    late = [s for s in stand.samples if s["at"] >= WARM_SHARE * stand.samples[-1]["at"]]
    for name in (*(f"{kind}/{s}" for kind in ("memory", "files") for s in stand.services), "redis", "keys"):
        known = [(s["at"], s[name]) for s in late if name in s]
        if len(known) < 3 or stand.restarts[name.partition("/")[2]]:
            continue
        at, values = np.array(known).T
        slope = float(np.polyfit(at, values, 1)[0] * 3600)
        first, last = float(np.median(values[:3])), float(np.median(values[-3:]))
        rows[name] = (first, last, slope)
        allowed = GROWTH * first + (GROWTH_BYTES if name.startswith("memory") else 64)
        if name.startswith(("memory", "files")) and last > allowed:
            stand.broken.append(f"{name} grew from {first:g} to {last:g}")
    return rows


def plot(stand: Stand, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(10, 11), sharex=True, layout="constrained")
    titles = ("streams that ended, per second", "resident memory (MiB)", "open files", "keys in Redis")
    at = [s["at"] for s in stand.samples]
    axes[0].plot(at[1:], np.diff([s["streams"] for s in stand.samples]) / np.maximum(np.diff(at), 1e-9))
    for row, kind, unit in ((1, "memory", 2.0**20), (2, "files", 1.0)):
        for name in stand.services:
            known = [(s["at"], s[f"{kind}/{name}"] / unit) for s in stand.samples if f"{kind}/{name}" in s]
            axes[row].plot(*np.array(known).T, label=name, linewidth=1)
    axes[1].legend(fontsize=7, ncol=4)
    axes[3].plot(*np.array([(s["at"], s["keys"]) for s in stand.samples if "keys" in s]).T)
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9)
        for begin, *_ in stand.events:
            axis.axvline(begin, color="0.8", linewidth=0.6, zorder=0)
    axes[-1].set_xlabel("seconds (grey: a failure begins)")
    figure.savefig(path, dpi=80)


def processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def report(stand: Stand, name: str, folder: Path, held: dict[str, float], command: str) -> str:
    """Writes NAME.md and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    plot(stand, folder / f"{name}.png")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    compared = NUM_TOKENS * (stand.done["coupled"] + stand.done["greedy"])
    lines = [
        f"# {name.capitalize()} report",
        "",
        f"`{command}`, commit {commit.strip()}, {time.strftime('%Y-%m-%d')}, {processor()} (shared with other work). "
        f"Two gateways, three verifiers, {len(stand.of('drafter'))} drafters, one Redis.",
        "",
        f"**{'Every promise was kept.' if not stand.broken else f'{len(stand.broken)} promises were broken.'}** "
        f"{stand.done.total()} streams ended ({', '.join(f'{n} {kind}' for kind, n in sorted(stand.done.items()))}); "
        f"{compared} tokens compared with an undisturbed run; {stand.interrupted} sampled streams were interrupted with their gateway, "
        f"as documented; processes were started again {stand.restarts.total()} times.",
        "",
        *(f"- {line}" for line in stand.broken),
        "",
    ]
    if stand.events:
        by_kind: dict[str, list[tuple[float, float]]] = {}
        for _, kind, recovery_s, pause_s in stand.events:
            by_kind.setdefault(kind, []).append((recovery_s, pause_s))
        lines += [
            "| failure | times | three streams ended after, at most (s) | longest pause of a stream (s) |",
            "|---|---|---|---|",
            *(
                f"| {kind} | {len(seen)} | {max(r for r, _ in seen):.1f} | {max(p for _, p in seen):.1f} |"
                for kind, seen in sorted(by_kind.items())
            ),
            "",
        ]
    lines += [
        f"At rest {len(held)} quantities were read (running and waiting requests, KV blocks in use, open trees, leases, "
        f"keys without an end): {sum(1 for value in held.values() if value)} were not 0.",
        "",
        "| of processes that were never restarted | after warming up | at the end | slope per hour |",
        "|---|---|---|---|",
    ]
    for what, (first, last, slope) in check_growth(stand).items():
        unit, text = (2.0**20, "MiB") if what.startswith(("memory", "redis")) else (1.0, "")
        lines.append(f"| {what} | {first / unit:.1f} {text} | {last / unit:.1f} {text} | {slope / unit:+.1f} {text} |")
    lines += ["", f"![{name}]({name}.png)", ""]
    text = "\n".join(lines)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return text


async def run(
    name: str,
    *,
    minutes: float,
    streams: int,
    seed: int,
    folder: Path | None,
    models: Models = TABLES,
    command: str = "",
) -> Stand:
    chaos = name == "chaos"
    dishonest = chaos and models is TABLES
    print(f"{name}: seed {seed}, {minutes:g} minutes, {streams} streams", flush=True)
    async with standing(seed, models=models, dishonest=dishonest, streams=streams) as stand:
        stand.began = time.monotonic()
        async with load(stand, streams):
            if chaos:
                await fail_again_and_again(stand, minutes)
            else:
                await asyncio.sleep(60 * minutes)
                await until(lambda: stand.done.total() > streams, RECOVERY_S)  # minutes may be few for a busy machine
        if dishonest:
            async with load(stand, min(streams, 6)):
                await check_dishonest(stand)
        held = await check_rest(stand)
        check_growth(stand)
        if folder is not None:
            stand.broken = [f"{line} ({times} times)" for line, times in Counter(stand.broken).items()]
            print(report(stand, name, folder, held, command))
    return stand


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=["chaos", "soak"])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=9)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--report", type=Path, default=None, help="folder for the report")
    parser.add_argument(
        "--heads", action="store_true", help="a random network with draft heads in place of tables; no drafter cheats"
    )
    given = parser.parse_args()
    options: dict[str, Any] = {"minutes": given.minutes, "streams": given.streams, "seed": given.seed}
    words = " ".join(f"{key.upper()}={value:.15g}" for key, value in options.items())  # a seed is printed whole
    words += ' ARGS="--heads"' if given.heads else ""
    with TemporaryDirectory() as place:
        options["models"] = with_a_head(Path(place)) if given.heads else TABLES
        stand = asyncio.run(run(given.name, folder=given.report, command=f"make {given.name} {words}", **options))
    for line in stand.broken:
        print(f"broken: {line}")
    return 1 if stand.broken else 0


if __name__ == "__main__":
    sys.exit(main())
