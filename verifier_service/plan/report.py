"""A plan for people and programs: tables, a plot, JSON, and the answer in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from rootward.errors import ConfigurationError
from verifier_service.plan.forecast import Forecast, acceptance, acceptance_by_depth
from verifier_service.plan.measurement import Measured

SHOWN_NUMBERS = (1, 2, 4, 8, 16, 32, 64)
PICTURES = (".png", ".svg", ".pdf")


def as_json(measured: Measured, found: Sequence[Forecast], *, about: dict[str, Any]) -> dict[str, Any]:
    """format, `about` (models, threads, ...), what was measured, and the forecasts. Milliseconds and tokens per second."""
    cells = [
        {
            "temperature": cell.temperature,
            "load": cell.load,
            "nodes": cell.nodes,
            "rounds": len(cell.verdicts),
            "step_ms": 1e3 * measured.step_s(cell.temperature, cell.load, cell.nodes),
            "draft_ms": 1e3 * measured.draft_s(cell.temperature, cell.load, cell.nodes),
            "tokens_per_round": 1.0 + sum(len(v.path) for v in cell.verdicts) / max(1, len(cell.verdicts)),
        }
        for cell in measured.cells
    ]
    return {
        "format": "rootward-plan/1",
        **about,
        "rounds": cells,
        "overhead_ms": {str(load): 1e3 * seconds for load, seconds in measured.overhead_s.items()},
        "hop_ms": 1e3 * measured.hop_s,
        "acceptance_by_number": {f"{t:g}": acceptance(measured, t) for t in measured.temperatures},
        "acceptance_by_depth": {f"{t:g}": acceptance_by_depth(measured, t) for t in measured.temperatures},
        "forecasts": [
            {
                "temperature": one.temperature,
                "load": one.load,
                "rtt_ms": one.rtt_ms,
                "pays": one.pays,
                "speedup": one.speedup,
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


def tables(measured: Measured, found: Sequence[Forecast]) -> list[Table]:
    """Step times, acceptance, forecasts."""
    return [_times(measured), _acceptance(measured), _forecasts(found)]


def answer(found: Sequence[Forecast]) -> str:
    """Will it pay? Of the forecasts that are given, in one sentence."""
    paying = [one for one in found if one.pays]
    best = max(found, key=lambda one: one.speedup)
    where = f"temperature {best.temperature:g}, {best.load} session{'s' * (best.load > 1)}"
    if not paying:
        closest = max(found, key=lambda one: one.with_trees)
        hint = f"; most would help {closest.helps_most.value}" if closest.helps_most is not None else ""
        return f"No: decode plainly. Trees would give {closest.with_trees:.2f} x of plain decoding at best{hint}."
    always = len(paying) == len(found)
    lost = [one for one in found if not one.pays]
    but = "" if always else f", but not at {', '.join(sorted({_place(one) for one in lost}))}"
    return f"Yes: {best.speedup:.2f} x at {where}, with {best.nodes} nodes a round{but}."


def check_picture(path: Path) -> None:
    """ConfigurationError if `draw` could not write this file; asked before minutes of measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--out: the picture needs matplotlib; run pip install matplotlib")
    if path.suffix not in PICTURES:
        raise ConfigurationError(f"--out: {str(path)!r}: name a .png, .svg or .pdf file")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--out: no folder {str(path.parent)!r}; make it, or name another file")


def draw(measured: Measured, found: Sequence[Forecast], path: Path, title: str) -> None:
    """Speed-up by load and by distance, and acceptance, as a picture in the format of the suffix (png, svg, pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    by_load, by_distance, by_depth = figure.subplots(1, 3)
    nearest = min(one.rtt_ms for one in found)
    for temperature in measured.temperatures:
        name = f"T = {temperature:g}"
        own = [one for one in found if one.temperature == temperature]
        near = [one for one in own if one.rtt_ms == nearest]
        by_load.plot([one.load for one in near], [one.speedup for one in near], marker="o", label=name)
        for load, style in zip(sorted({one.load for one in own}), ("-", "--", ":", "-.") * 8, strict=False):
            far = [one for one in own if one.load == load]
            places = [one.rtt_ms for one in far]
            by_distance.plot(places, [one.speedup for one in far], style, marker="o", label=f"{name}, load {load}")
        depths = acceptance_by_depth(measured, temperature)
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


def _times(measured: Measured) -> Table:
    table = Table("sessions", "nodes", "rows", "step, ms", "draft, ms", "per row, ms", title="times at temperature 0")
    first = measured.temperatures[0]
    for load in measured.loads:
        for nodes in measured.sizes:
            step_ms, draft_ms = (1e3 * value(first, load, nodes) for value in (measured.step_s, measured.draft_s))
            rows = load * (nodes + 1)
            drafting = f"{draft_ms:.2f}" if draft_ms else "-"
            table.add_row(str(load), str(nodes), str(rows), f"{step_ms:.2f}", drafting, f"{step_ms / rows:.2f}")
    table.title = f"times at temperature {first:g}"
    return table


def _acceptance(measured: Measured) -> Table:
    numbers = [n for n in SHOWN_NUMBERS if n <= measured.most]
    table = Table("T", *(f"node {n}" for n in numbers), "by depth", title="acceptance by number in draw order")
    for temperature in measured.temperatures:
        known = acceptance(measured, temperature)
        depths = " ".join(f"{share:.2f}" for share in acceptance_by_depth(measured, temperature))
        table.add_row(f"{temperature:g}", *(f"{known[n - 1]:.2f}" for n in numbers), depths or "-")
    return table


def _forecasts(found: Sequence[Forecast]) -> Table:
    columns = ("T", "sessions", "plain", "expected", "speed-up", "nodes", "tokens a round")
    table = Table(
        *columns, "would help most", title=f"forecast, tokens/s of all sessions, {found[0].rtt_ms:g} ms to the drafter"
    )
    for one in found:
        colour = "green" if one.pays else "yellow"
        helps = one.helps_most
        hint = f"{helps.value}: {one.changes[helps]:.2f}" if helps is not None else "-"
        trees = "" if one.pays else f" (trees: {one.with_trees:.2f})"
        numbers = (f"{one.temperature:g}", str(one.load), f"{one.plain:.1f}", f"{one.speed:.1f}")
        speedup = f"[{colour}]{one.speedup:.2f}{trees}[/]"
        table.add_row(*numbers, speedup, str(one.nodes), f"{one.tokens_per_round:.2f}", hint)
    return table
