"""Output of commands: coloured tokens, tables, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rootward.cli.options import OutputFormat
from rootward.client.types import GenerationResult, TokenDelta

ACCEPTED = "green"  # an accepted draft token
BONUS = "yellow"  # a bonus token

_CONTROL_CHARACTERS = {
    c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), 127, *range(128, 160)) if chr(c) not in "\n\t"
}


def show(content: object, view: RenderableType, output: OutputFormat) -> None:
    """Print the content as one line of JSON, or its view for people."""
    if output is OutputFormat.json:
        print(json.dumps(content))
    else:
        Console().print(view)


def visible(text: str) -> str:
    """The text without control characters, so that model output cannot send commands to the terminal."""
    return text.translate(_CONTROL_CHARACTERS)


def print_delta(console: Console, delta: TokenDelta) -> None:
    """Print a delta: coloured tokens on a terminal, otherwise the unchanged text."""
    if not console.is_terminal:
        console.file.write(delta.text)
        console.file.flush()
        return
    line = Text()
    for text, accepted in delta.spans:
        line.append(visible(text), ACCEPTED if accepted else BONUS)
    console.print(line, end="", soft_wrap=True, highlight=False)


def legend() -> Text:
    """The meaning of the colours."""
    return Text.assemble(("accepted draft token", ACCEPTED), "  ", ("bonus token", BONUS))


def stats_table(result: GenerationResult) -> Table:
    """Token counts, speculation statistics and times of one generation."""
    stats = result.speculation
    timing = result.timing
    tokens = result.usage.completion_tokens
    seconds = timing.total_ms / 1000
    rows = {
        "tokens": f"{tokens} after a prompt of {result.usage.prompt_tokens}",
        "finish": result.finish_reason if result.stop is None else f"{result.finish_reason} ({result.stop!r})",
        "target passes": f"{stats.num_target_passes} ({stats.num_spec_steps} with a tree)",
        "block efficiency": f"{stats.block_efficiency:.2f} tokens per pass",
        "draft tokens": f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} accepted",
        "first token": f"{timing.ttft_ms:.0f} ms",
        "speed": f"{tokens / seconds:.1f} tokens/s" if seconds else "-",
        "verification": stats.verification or "-",
        "seed": str(stats.seed),
    }
    return key_values(rows)


def key_values(rows: dict[str, str]) -> Table:
    """A table of two columns without header. Texts are shown as they are, without markup."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for key, value in rows.items():
        table.add_row(Text(key), Text(value))
    return table


def as_json(result: GenerationResult) -> str:
    """A result as JSON, without its fields `raw` and `choices`."""
    content = asdict(replace(result, raw=None, choices=()))
    del content["raw"], content["choices"]
    return json.dumps(content, ensure_ascii=False)
