"""A plan for people and programs: tables, a plot, JSON, and the answer in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from rootward.errors import ConfigurationError
from rootward.plan.forecast import PAYS, Forecast, acceptance_by_depth
from rootward.plan.measurement import Measured, Run

PICTURES = (".png", ".svg", ".pdf")


def as_json(measured: Sequence[Measured], found: Sequence[Forecast], *, about: dict[str, Any]) -> dict[str, Any]:
    """format, `about` (models, threads, ...), what was measured, and the forecasts. Milliseconds and tokens per second."""
    return {
        "format": "rootward-plan/2",
        **about,
        "measured": [
            {
                "temperature": one.temperature,
                "load": one.load,
                "plain_tokens_per_s": one.plain.rate,
                "auto_tokens_per_s": one.auto.rate,
                "lookup_tokens_per_s": None if one.lookup is None else one.lookup.rate,
                "plain_round_ms": 1e3 * one.plain.round_s,
                "trees": [
                    {
                        "nodes": nodes,
                        "rounds": run.accepted.total(),
                        "tokens_per_s": run.rate,
                        "tokens_per_round": run.tokens_per_round,
                        "round_ms": 1e3 * run.round_s,
                        "draft_ms": 1e3 * one.draft_s(nodes),
                        "rows_ms": 1e3 * one.row_s(nodes),
                        "acceptance_by_depth": acceptance_by_depth(run),
                    }
                    for nodes, run in one.trees.items()
                ],
            }
            for one in measured
        ],
        "forecasts": [
            {
                "temperature": one.temperature,
                "load": one.load,
                "rtt_ms": one.rtt_ms,
                "pays": one.pays,
                "speedup": one.speedup,
                "lookup": one.lookup,
                "with_trees": one.with_trees,
                "plain_tokens_per_s": one.plain,
                "tokens_per_s": one.speed,
                "nodes": one.nodes,
                "tokens_per_round": one.tokens_per_round,
                "helps_most": one.helps_most.value if one.helps_most is not None else None,
                "speedup_with": {change.name.lower(): speedup for change, speedup in one.changes.items()},
            }
            for one in found
        ],
    }


def tables(measured: Sequence[Measured], found: Sequence[Forecast]) -> list[Table]:
    """Rounds, acceptance, forecasts."""
    return [_rounds(measured), _acceptance(measured), _forecasts(found)]


def answer(found: Sequence[Forecast]) -> str:
    """Will it pay? Of the forecasts that are given, in one sentence."""
    paying = [one for one in found if one.pays]
    best = max(found, key=lambda one: one.speedup)
    where = f"temperature {best.temperature:g}, {best.load} session{'s' * (best.load > 1)}"
    if not paying:
        closest = max(found, key=lambda one: one.with_trees)
        hint = f"; most would help {closest.helps_most.value}" if closest.helps_most is not None else ""
        return f"No: decode plainly. Trees would give {closest.with_trees:.2f} x of plain decoding at best{hint}."
    if best.lookup is not None and best.speedup < PAYS * best.lookup:
        return f"Yes, but not for this draft: {best.speedup:.2f} x at {where}, and n-grams of the text alone give {best.lookup:.2f} x."
    lost = sorted({_place(one) for one in found if not one.pays})
    but = f", but not at {', '.join(lost)}" if lost else ""
    alone = f" (n-grams alone: {best.lookup:.2f} x)" if best.lookup is not None else ""
    return f"Yes: {best.speedup:.2f} x at {where}{alone}{but}."


def check_picture(path: Path) -> None:
    """ConfigurationError if `draw` could not write this file; asked before minutes of measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--out: the picture needs matplotlib; run pip install matplotlib")
    if path.suffix not in PICTURES:
        raise ConfigurationError(f"--out: {str(path)!r}: name a .png, .svg or .pdf file")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--out: no folder {str(path.parent)!r}; make it, or name another file")


def draw(measured: Sequence[Measured], found: Sequence[Forecast], path: Path, title: str) -> None:
    """Speed-up by load and by distance, and acceptance, as a picture in the format of the suffix (png, svg, pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    by_load, by_distance, by_depth = figure.subplots(1, 3)
    nearest = min(one.rtt_ms for one in found)
    for temperature in sorted({one.temperature for one in measured}):
        name = f"T = {temperature:g}"
        own = [one for one in found if one.temperature == temperature]
        near = [one for one in own if one.rtt_ms == nearest]
        by_load.plot([one.load for one in near], [one.speedup for one in near], marker="o", label=name)
        for load, style in zip(sorted({one.load for one in own}), ("-", "--", ":", "-.") * 8, strict=False):
            far = [one for one in own if one.load == load]
            places = [one.rtt_ms for one in far]
            by_distance.plot(places, [one.speedup for one in far], style, marker="o", label=f"{name}, load {load}")
        depths = _depths_of(measured, temperature)
        by_depth.plot(range(1, len(depths) + 1), depths, marker="o", label=name)
    for axes, label in ((by_load, "sessions"), (by_distance, "round trip to the drafter, ms")):
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(xlabel=label, ylabel="speed-up over plain decoding")
        axes.set_ylim(bottom=0)
    by_depth.set(xlabel="depth", ylabel="share of rounds that accept", ylim=(0, 1))
    for axes in (by_load, by_distance, by_depth):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--out: {str(path)!r} cannot be written ({error}); name another file") from None


def _place(one: Forecast) -> str:
    distance = f", {one.rtt_ms:g} ms away" if one.rtt_ms else ""
    return f"temperature {one.temperature:g} with {one.load} session{'s' * (one.load > 1)}{distance}"


def _rounds(measured: Sequence[Measured]) -> Table:
    """Of the first temperature: the others differ in acceptance alone."""
    first = measured[0].temperature
    columns = ("sessions", "nodes", "tokens a round", "round, ms", "drafts, ms", "tokens/s")
    table = Table(*columns, title=f"rounds at temperature {first:g}")
    for one in measured:
        if one.temperature != first:
            continue
        for nodes, run in ({0: one.plain} | one.trees).items():
            draft_ms = 1e3 * one.draft_s(nodes) if nodes else 0.0
            table.add_row(
                str(one.load),
                str(nodes),
                f"{run.tokens_per_round:.2f}",
                f"{1e3 * run.round_s:.2f}",
                f"{draft_ms:.2f}" if draft_ms else "-",
                f"{run.rate:.1f}",
            )
    return table


def _acceptance(measured: Sequence[Measured]) -> Table:
    nodes = max(measured[0].trees)
    table = Table("T", "1, 2, ... tokens deep", title=f"share of rounds that accept, trees of {nodes} nodes")
    for temperature in sorted({one.temperature for one in measured}):
        depths = " ".join(f"{share:.2f}" for share in _depths_of(measured, temperature))
        table.add_row(f"{temperature:g}", depths or "-")
    return table


def _depths_of(measured: Sequence[Measured], temperature: float) -> list[float]:
    """Acceptance by depth of the largest trees, over all loads: it depends on the text alone."""
    largest = Run(load=1)
    for one in measured:
        if one.temperature == temperature:
            largest.accepted += one.trees[max(one.trees)].accepted
    return acceptance_by_depth(largest)


def _forecasts(found: Sequence[Forecast]) -> Table:
    """Speed-ups are told with speculation as the services do it, with n-grams alone, and with trees of the best size in every round."""
    title = f"forecast, tokens/s of all sessions, {found[0].rtt_ms:g} ms to the drafter"
    columns = (
        "T",
        "sessions",
        "plain",
        "expected",
        "speed-up",
        "n-grams alone",
        "every round a tree",
        "would help most",
    )
    table = Table(*columns, title=title)
    for one in found:
        helps = one.helps_most
        table.add_row(
            f"{one.temperature:g}",
            str(one.load),
            f"{one.plain:.1f}",
            f"{one.speed:.1f}",
            f"[{'green' if one.pays else 'yellow'}]{one.speedup:.2f}[/]",
            "-" if one.lookup is None else f"{one.lookup:.2f}",
            f"{one.with_trees:.2f} ({one.nodes} nodes)",
            "-" if helps is None else f"{helps.value}: {one.changes[helps]:.2f}",
        )
    return table
