"""`python -m rootward.demo.run` (`make demo`): serve the demo pair, watch it write, measure it with and without speculation.

Starts `rootward serve all` on free ports, streams held-out prompts with accepted draft tokens coloured, then runs prompts side
by side on the same server: with a tree in every round, as the server sees fit, and without speculation. Exit code 1 when
tokens per target pass (with a tree in every round) are below what is promised.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rootward.cli.output import legend, print_delta, visible
from rootward.client import Client, GenerationResult, SamplingParams
from rootward.demo import prompts
from rootward.errors import RootwardError

START_S, STOP_S = 120.0, 30.0
NUM_SHOWN, NUM_MEASURED = 3, 20
SHOWN_TOKENS, MEASURED_TOKENS = 96, 48
PROMISED = {0.0: 2.0, 1.0: 1.7}  # temperature -> block efficiency: tokens per pass of the target
MODES = ("required", "auto", "disabled")
READY = "rootward all listening on "


class DemoFailed(RootwardError):
    """The demo did not do what it promises; the message says what."""


@dataclass(slots=True)
class Tally:
    """Counts of several generations under one condition."""

    tokens: int = 0
    passes: int = 0
    accepted: int = 0
    seconds: float = 0.0  # as the client saw it

    def add(self, result: GenerationResult, seconds: float) -> None:
        self.tokens += result.usage.completion_tokens
        self.passes += result.speculation.num_target_passes
        self.accepted += result.speculation.num_accepted_draft_tokens
        self.seconds += seconds

    @property
    def block_efficiency(self) -> float:
        return 1 + self.accepted / self.passes if self.passes else 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


Measured = dict[float, dict[str, Tally]]  # temperature -> mode of speculation -> counts


@contextmanager
def served(console: Console) -> Iterator[str]:
    """The address of a gateway in front of the demo pair. Everything is stopped on leaving."""
    command = [sys.executable, "-m", "rootward.cli", "serve", "all", "--log-level", "warning"]
    command += ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    with tempfile.TemporaryDirectory(prefix="rootward-demo-") as folder, open(Path(folder) / "log", "w+b") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            with console.status("starting Redis, drafter, verifier and gateway …"):
                lines = _until_ready(process, log)
            for line in lines:
                console.print(line, style="dim", highlight=False)
            yield lines[-1].removeprefix(READY).split()[0]
        finally:
            _stop(process)
    console.print("all processes have stopped", style="dim")


def _until_ready(process: subprocess.Popen[str], log: IO[bytes]) -> list[str]:
    """The lines up to the one that says all is ready."""
    arrived: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_pump, args=(process, arrived), daemon=True).start()
    lines: list[str] = []
    deadline = time.monotonic() + START_S
    while not lines or not lines[-1].startswith(READY):
        try:
            line = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise DemoFailed(
                f"the services were not ready after {START_S:.0f} s; they logged:\n{_end_of(log)}"
            ) from None
        if not line:
            raise DemoFailed(f"the services did not start (exit code {process.wait()}); they logged:\n{_end_of(log)}")
        lines.append(line.strip())
    return lines


def _pump(process: subprocess.Popen[str], arrived: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        arrived.put(line)
    arrived.put("")


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-15:])


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # the second time they do not wait for anything
        process.wait(STOP_S)


def show(console: Console, client: Client, texts: Sequence[str]) -> None:
    """Stream continuations, coloured by where each token came from."""
    for text, temperature in zip(texts, (0.0, 0.0, 1.0), strict=False):
        console.print()
        console.rule(f"temperature {temperature:g}", align="left")
        console.print(visible(text), style="dim", end="", highlight=False, markup=False, soft_wrap=True)
        params = SamplingParams(temperature, max_tokens=SHOWN_TOKENS)
        with client.stream(text, sampling=params, speculation="required") as stream:
            for delta in stream:
                print_delta(console, delta)
            result = stream.get_final_result()
        stats = result.speculation
        line = f"{result.usage.completion_tokens} tokens in {stats.num_target_passes} passes of the target"
        console.print("\n", Padding(line, (0, 0, 0, 2)), style="cyan", highlight=False)
    console.print(legend() if console.is_terminal else "")


def measure(console: Console, client: Client, texts: Sequence[str]) -> Measured:
    """The same prompts in every mode, in turn, so that all modes see the same machine."""
    for mode in MODES:
        client.generate(texts[0], sampling=SamplingParams(0.0, max_tokens=8), speculation=mode)  # warm up
    measured: Measured = {temperature: {mode: Tally() for mode in MODES} for temperature in PROMISED}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=len(MODES) * len(PROMISED) * len(texts))
        for number, text in enumerate(texts):
            for temperature, tallies in measured.items():
                for mode in MODES[number % 3 :] + MODES[: number % 3]:
                    params = SamplingParams(temperature, max_tokens=MEASURED_TOKENS)
                    started = time.perf_counter()
                    result = client.generate(text, sampling=params, speculation=mode)
                    tallies[mode].add(result, time.perf_counter() - started)
                    progress.advance(task)
    return measured


def spread(texts: Sequence[str], count: int) -> list[str]:
    """`count` of them from all over the list: neighbours come from the same file."""
    return [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]


def table(measured: Measured, count: int) -> Table:
    """Tokens per pass with a tree in every round; tokens per second in every mode, and against plain decoding."""
    out = Table(title=f"{count} held-out prompts, up to {MEASURED_TOKENS} tokens each", title_justify="left")
    speeds = ("tokens/s\nwith trees", "tokens/s\nauto", "tokens/s\nplain")
    for heading in ("T", "tokens", "target\npasses", "block\nefficiency", *speeds):
        out.add_column(heading, justify="right", no_wrap=True)
    for temperature, tallies in measured.items():
        trees, auto, plain = (tallies[mode] for mode in MODES)
        counts = (f"{temperature:g}", str(trees.tokens), str(trees.passes), f"{trees.block_efficiency:.2f}")
        out.add_row(*counts, _compared(trees, plain), _compared(auto, plain), f"{plain.speed:.1f}")
    return out


def _compared(one: Tally, other: Tally) -> str:
    return f"{one.speed:.1f} ({one.speed / other.speed:.2f}×)" if other.speed else f"{one.speed:.1f}"


def shortfalls(measured: Measured) -> list[str]:
    """Promises that were not kept, one line each."""
    return [
        f"block efficiency {measured[t]['required'].block_efficiency:.2f} at temperature {t:g} is below the promised {promised:g}"
        for t, promised in PROMISED.items()
        if measured[t]["required"].block_efficiency < promised
    ]


def demo(console: Console) -> None:
    texts = prompts()
    console.print(Panel.fit("Rootward: a small model drafts trees, a larger one checks a whole tree per pass"))
    with served(console) as address, Client(address, timeout=60.0) as client:
        show(console, client, spread(texts, NUM_SHOWN))
        chosen = spread(texts, NUM_MEASURED)
        measured = measure(console, client, chosen)
        console.print(table(measured, len(chosen)))
    if missed := shortfalls(measured):
        raise DemoFailed("; ".join(missed))


def main() -> int:
    """Exit code 0 when everything promised was seen, 1 otherwise, 130 when interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the services are stopped, too
    try:
        demo(Console())
    except RootwardError as error:
        print(f"rootward demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
