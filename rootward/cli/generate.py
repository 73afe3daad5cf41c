"""`rootward generate PROMPT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rootward.cli.options import (
    DEFAULT_URL,
    ApiKey,
    Model,
    NoSpeculation,
    Output,
    OutputFormat,
    Seed,
    Stop,
    Temperature,
    Timeout,
    TopP,
    Url,
)
from rootward.cli.output import as_json, legend, print_delta, stats_table
from rootward.client import Client, SamplingParams, Speculation
from rootward.client.codec import VERIFICATIONS


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: Annotated[int, typer.Option(help="Keep only this many of the most likely tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability relative to the most likely token.")] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Penalty for tokens of prompt and text; 1 is off. (default: 1)")
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Penalty for tokens that already occur in the text, from -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Penalty for each occurrence of a token in the text, from -2 to 2.")
    ] = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    min_tokens: Annotated[int, typer.Option(help="Minimum number of tokens before the text may end.")] = 0,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with a JSON schema that the text must follow; - reads standard input."),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole text must match.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of this many likely tokens per position; needs --output json.")
    ] = None,
    no_speculation: NoSpeculation = False,
    verification: Annotated[
        str | None, typer.Option(help=f"Verification rule: {', '.join(VERIFICATIONS)}. (default: the server's)")
    ] = None,
    model: Model = "",
    timeout: Timeout = 600.0,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts and times at the end.")] = False,
    output: Output = OutputFormat.text,
) -> None:
    """Stream a continuation to the terminal: accepted draft tokens in green, bonus tokens in yellow.

    Every pass of the target model adds exactly one bonus token; all other tokens of the pass come for free.
    """
    if logprobs is not None and output is OutputFormat.text:
        raise typer.BadParameter("needs --output json", param_hint="--logprobs")
    if prompt == json_schema == "-":
        raise typer.BadParameter(
            "- is standard input, which is the prompt already; name a file", param_hint="--json-schema"
        )
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        stop=tuple(stop or ()),
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        json_schema=None if json_schema is None else _read(json_schema),
        regex=regex,
        logprobs=logprobs,
    )
    speculation = Speculation("disabled" if no_speculation else "auto", verification)
    console = Console()
    notes = Console(stderr=True)
    with (
        Client(url, api_key=api_key or None, timeout=timeout) as client,
        client.stream(text, sampling=sampling, speculation=speculation, model=model) as stream,
    ):
        if output is OutputFormat.text:
            shown = False
            try:
                for delta in stream:
                    print_delta(console, delta)
                    shown = True
            finally:
                if shown:
                    console.file.write("\n")
        result = stream.get_final_result()
    if output is OutputFormat.json:
        print(as_json(result))
    if stats:
        if console.is_terminal:
            notes.print(legend())
        notes.print(stats_table(result))


def _read(name: str) -> str:
    """The text of a file. ValueError, naming the option, if it is none."""
    if name == "-":
        return sys.stdin.read()
    if not name.strip():
        raise ValueError(
            f"--json-schema: {name!r} names no file; name a file with a JSON schema, or - for standard input"
        )
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--json-schema: '{name}' cannot be read ({error}); name a file of UTF-8 text") from error
