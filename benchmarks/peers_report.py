"""Tables of `benchmarks.peers`: on the terminal, as Markdown, and between the markers of a page (docs/results/index.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import markdown_table, mean_with_error
from rootward.errors import ConfigurationError

COLOURS = {"rootward": "#3f6fb5"}  # of the bars; all others are grey
BEGIN, END = "<!-- peers: begin, written by benchmarks.peers -->", "<!-- peers: end -->"
VALUES = (
    ("tokens_per_s", 1, "tokens/s"),
    ("first_token_ms", 0, "time to first token, ms"),
    ("token_ms", 1, "time per output token after the first, ms"),
)
PLAIN, SPECULATIVE = "plain", "speculative"
RATIOS = "speculative over plain: mean of the repetitions ± its standard error"
NAMES = {"rootward": "Rootward", "transformers": "transformers", "llama.cpp": "llama.cpp", "vllm": "vLLM"}


def measured(report: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Key, digits and title of each value that the report has: older ones lack the time per output token."""
    return [entry for entry in VALUES if all(entry[0] in series for series in report["series"])]


def settings_of(report: dict[str, Any]) -> list[tuple[float, int]]:
    """(temperature, batch) of every column."""
    return sorted({(series["temperature"], series["batch"]) for series in report["series"]})


def rows_of(report: dict[str, Any], value: str, digits: int) -> list[list[str]]:
    """System and mode, then one value per setting; the best of each column in bold."""
    by_row: dict[tuple[str, str], dict[tuple[float, int], float]] = {}
    for series in report["series"]:
        row = by_row.setdefault((series["system"], series["mode"]), {})
        row[series["temperature"], series["batch"]] = series[value]
    choose = max if value == "tokens_per_s" else min
    best = {key: choose(row[key] for row in by_row.values() if key in row) for key in settings_of(report)}
    rows = []
    for (system, mode), values in by_row.items():
        cells = [f"{values[key]:.{digits}f}" if key in values else "" for key in settings_of(report)]
        bold = [f"**{cell}**" if values.get(key) == best[key] else cell for cell, key in zip(cells, best, strict=True)]
        rows.append([f"{NAMES[system]}, {mode}", *bold])
    return rows


def ratios_of(report: dict[str, Any]) -> list[list[str]]:
    """System, then tokens/s with speculation over plain decoding for each setting: the mean over the repetitions, each of which ran both,
    and its standard error. A single ratio tells little where the speed of a machine changes within seconds."""
    rates = {
        (series["system"], series["mode"], series["temperature"], series["batch"]): [
            run["tokens"] / run["seconds"] for run in series["runs"]
        ]
        for series in report["series"]
    }
    rows = []
    for system in dict.fromkeys(series["system"] for series in report["series"]):
        cells = []
        for setting in settings_of(report):
            speculative, plain = rates.get((system, SPECULATIVE, *setting)), rates.get((system, PLAIN, *setting))
            ratios = [a / b for a, b in zip(speculative, plain, strict=True)] if speculative and plain else []
            cells.append(mean_with_error(ratios) if ratios else "")
        rows.append([NAMES[system], *cells])
    return rows


def print_tables(report: dict[str, Any]) -> None:
    """A table for each measured value, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for value, digits, title in measured(report):
        table = Table(title=f"{report['model']}, {report['dtype']}, {report['hardware']}: {title}")
        table.add_column("")
        for temperature, batch in settings_of(report):
            table.add_column(f"T = {temperature:g}\nbatch {batch}", justify="right")
        for name, *cells in rows_of(report, value, digits):
            styled = (f"[bold]{cell.strip('*')}[/bold]" if cell.startswith("**") else cell for cell in cells)
            table.add_row(name, *styled)
        console.print(table)
    table = Table(title=RATIOS)
    table.add_column("")
    for temperature, batch in settings_of(report):
        table.add_column(f"T = {temperature:g}\nbatch {batch}", justify="right")
    for row in ratios_of(report):
        table.add_row(*row)
    console.print(table)
    for system, why in report["missing"].items():
        console.print(f"{system} is missing: {why}")


def table_of(report: dict[str, Any], value: str, digits: int, first: str) -> str:
    return markdown_table(header_of(report, first), rows_of(report, value, digits))


def header_of(report: dict[str, Any], first: str) -> list[str]:
    return [first, *(f"T = {temperature:g}, {batch}" for temperature, batch in settings_of(report))]


def heading(report: dict[str, Any]) -> str:
    """Model, precision, hardware, commit, versions in one sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "rootward")
    speculation = f"draft model {report['draft']}" if report["draft"] else "n-gram speculation"
    if flags := report.get("verifier_flags"):
        speculation += f" (Rootward: `{flags}`)"
    beside = f", busy processes beside it: {report['busy']}" if report.get("busy") else ""
    prompts = f"prompts of {tokens} tokens and a question, " if (tokens := report.get("prompt_tokens")) else ""
    return (
        f"{report['model']}, {report['dtype']}, {speculation}, {prompts}{report['max_tokens']} tokens per answer, "
        f"medians of {report['repeats']} interleaved runs. "
        f"{report['hardware']}, {report['threads']} threads per engine{beside}, {report['date']}, commit {report['commit']}; {versions}."
    )


def as_markdown(reports: Sequence[dict[str, Any]]) -> str:
    """The tables of every report."""
    parts = []
    for report in reports:
        parts.append(heading(report))
        parts += [
            table_of(report, value, digits, f"{title}; T, requests at once")
            for value, digits, title in measured(report)
        ]
        parts.append(markdown_table(header_of(report, f"{RATIOS}; T, requests at once"), ratios_of(report)))
        parts += [f"{NAMES[system]} was not installed." for system in report["missing"]]
    return "\n\n".join(parts) + "\n"


def write_readme(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Replace the text between the markers by `comparison`. ValueError without markers."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path.name}: no markers {BEGIN!r} and {END!r}; add them where the tables belong")
    path.write_text(before + BEGIN + "\n" + comparison(reports) + "\n" + END + after, encoding="utf-8")


def comparison(reports: Sequence[dict[str, Any]]) -> str:
    """A table of tokens per second for each number of requests at once, with the columns of all reports, then their headings."""
    batches = sorted({batch for report in reports for _, batch in settings_of(report)})
    parts = [batch_table(reports, batch) for batch in batches]
    return "\n\n".join([*parts, "\n".join(f"- {heading(report)}" for report in reports)])


def batch_table(reports: Sequence[dict[str, Any]], batch: int) -> str:
    """Systems and modes in rows, processors and temperatures in columns; the best of each column in bold."""
    header = [f"tokens/s, {batch} {'request' if batch == 1 else 'requests'} at once"]
    columns: list[dict[tuple[str, str], float]] = []
    for report in reports:
        for temperature in [t for t, own_batch in settings_of(report) if own_batch == batch]:
            header.append(f"{report['hardware'].rpartition(',')[0]}, T = {temperature:g}")
            columns.append(
                {
                    (series["system"], series["mode"]): series["tokens_per_s"]
                    for series in report["series"]
                    if (series["temperature"], series["batch"]) == (temperature, batch)
                }
            )
    rows = []
    for system, mode in sorted(
        {key for column in columns for key in column}, key=lambda key: (list(NAMES).index(key[0]), key[1])
    ):
        values = [column.get((system, mode)) for column in columns]
        cells = [
            "" if value is None else f"**{value:.1f}**" if value == max(column.values()) else f"{value:.1f}"
            for value, column in zip(values, columns, strict=True)
        ]
        rows.append([f"{NAMES[system]}, {mode}", *cells])
    return markdown_table(header, rows)


def chart(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of tokens per second of one request: a panel for every processor and temperature. ConfigurationError if none is."""
    from matplotlib.figure import Figure

    temperatures = sorted(
        {temperature for report in reports for temperature, batch in settings_of(report) if batch == 1}
    )
    if not temperatures:
        raise ConfigurationError("--plot: no result is of one request at once; measure with 1 among --batches")
    figure = Figure(figsize=(3.4 * len(reports), 2.0 * len(temperatures)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(temperatures), len(reports), squeeze=False)
    for row, temperature in zip(panels, temperatures, strict=True):
        for axes, report in zip(row, reports, strict=True):
            bars = [
                (f"{NAMES[series['system']]}, {series['mode']}", series["tokens_per_s"], series["system"])
                for series in report["series"]
                if (series["temperature"], series["batch"]) == (temperature, 1)
            ]
            if not bars:
                axes.set_axis_off()
                continue
            bars.sort(key=lambda bar: bar[1])
            names, values, systems = zip(*bars, strict=True)
            drawn = axes.barh(names, values, color=[COLOURS.get(system, "#b0b0b0") for system in systems])
            axes.bar_label(drawn, fmt=" %.0f", fontsize=7)
            axes.set_title(f"{report['hardware'].rpartition(',')[0]}, T = {temperature:g}", fontsize=8)
            axes.tick_params(labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.14)
    figure.supxlabel("tokens per second of one request", fontsize=8)
    figure.savefig(path, dpi=110)
