"""The report of a run: Markdown, JSON and one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.intervals import Interval
from benchmarks.suites.baselines import ASSISTED, GENERATE
from benchmarks.suites.ours import PLAIN
from benchmarks.suites.paired import Paired

COLOURS = ("#000000", "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73")  # of Okabe and Ito
REFERENCES = {"plain": PLAIN, "generate": GENERATE, "assisted": ASSISTED}


class Setting(NamedTuple):
    """What varies within a run. `context`: tokens of every prompt; 0: prompts as they are."""

    temperature: float
    context: int
    sessions: int

    def title(self) -> str:
        context = f"prompts of {self.context} tokens" if self.context else "short prompts"
        return f"T = {self.temperature:g}, {context}, {self.sessions} session{'s' * (self.sessions > 1)}"


class Measured(NamedTuple):
    """One setting's runs, what each system was tuned to, and what was tried (tokens per second)."""

    setting: Setting
    paired: Paired
    chosen: dict[str, str]
    trials: dict[str, dict[str, float]]


def write(out: Path, head: dict[str, Any], found: Sequence[Measured], *, last: bool) -> None:
    """serving.json and serving.md; with the last setting, and where matplotlib is installed, serving.png."""
    out.mkdir(parents=True, exist_ok=True)
    content = head | {"settings": [as_values(m) for m in found]}
    (out / "serving.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    picture = last and draw(head, found, out / "serving.png")
    (out / "serving.md").write_text(markdown(head, found, picture), encoding="utf-8")


def as_values(measured: Measured) -> dict[str, Any]:
    """Everything that was measured, raw runs included."""
    paired = measured.paired
    systems = {}
    for name in paired.runs:
        ratios = {key: paired.ratio(name, to)._asdict() for key, to in REFERENCES.items() if to in paired.runs}
        systems[name] = {
            "chosen": measured.chosen.get(name, ""),
            "tokens_per_s": paired.tokens_per_s(name),
            "ratio_to": ratios,
            "tokens_per_pass": paired.tokens_per_pass(name),
            "acceptance": paired.acceptance(name),
            "same_text_as_plain": paired.same_text(name, PLAIN) if PLAIN in paired.runs else None,
            "runs": [run.numbers() for run in paired.runs[name]],
        }
    return measured.setting._asdict() | {"systems": systems, "trials": measured.trials}


def markdown(head: dict[str, Any], found: Sequence[Measured], picture: bool) -> str:
    """serving.md."""
    env, options = head["environment"], head["options"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    lines = [
        "# Serving, side by side",
        "",
        f"{env['date']}, commit {env['commit'] or 'unknown'}. {env['hardware']}; {head['device']}, {options['dtype']}. {versions}.",
        f"torch threads: {options['threads']} for every target, {options['draft_threads']} for our drafter "
        f"(transformers' draft runs on the target's {options['threads']}).",
        "",
        head["pair_sentence"],
        "",
        f"{options['pairs']} repetitions, systems interleaved in rotating order, {options['max_tokens']} tokens a session, end of text "
        "ignored; the same prompts and seeds for all, no prompt twice. Times are of whole requests, prefill included; *later* is without "
        "the prompt and the first tokens. Medians; ratios "
        f"within a repetition, with the interval of the median (coverage {coverage(found):.0%}).",
        "transformers settings were chosen on other jobs of the same setting before, all taking turns; assisted generation and prompt "
        "lookup take one sequence at a time and are missing where there are more.",
    ]
    if head["context_note"]:
        lines += ["", head["context_note"]]
    if picture:
        lines += ["", "![tokens per second](serving.png)"]
    for measured in found:
        lines += ["", f"## {measured.setting.title()}", "", _caption(head), "", _table(measured)]
        lines += _trials(measured)
    return "\n".join(lines) + "\n"


def coverage(found: Sequence[Measured]) -> float:
    """Of the intervals in the tables."""
    first = found[0].paired
    name = next(iter(first.runs))
    return first.ratio(name, name).coverage


def _caption(head: dict[str, Any]) -> str:
    pair = head["pair"]
    if not head["inflated"]:
        return f"Target of {pair['num_target'] / 1e6:.2f} M parameters."
    sizes = f"{pair['num_original'] / 1e6:.2f} M to {pair['num_target'] / 1e6:.1f} M parameters"
    return f"Inflated target, {sizes}; acceptance is the small pair's."


def _table(measured: Measured) -> str:
    paired = measured.paired
    references = {key: name for key, name in REFERENCES.items() if name in paired.runs}
    header = ["system", "tokens/s", *(f"× {key}" for key in references), "first token, s", "later × plain"]
    header += ["tokens a pass", "acceptance"]
    greedy = measured.setting.temperature == 0 and PLAIN in paired.runs
    header += ["text as plain"] * greedy
    rows = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for name in paired.runs:
        chosen = measured.chosen.get(name, "")
        acceptance = paired.acceptance(name)
        row = [f"{name} ({chosen})" if chosen else name, f"{paired.tokens_per_s(name):.1f}"]
        row += [_ratio(paired.ratio(name, to)) if name != to else "1" for to in references.values()]
        row += [_first(paired, name), _later(paired, name)]
        row += [f"{paired.tokens_per_pass(name):.2f}", "" if acceptance is None else f"{acceptance:.2f}"]
        row += [f"{paired.same_text(name, PLAIN):.0%}"] * greedy
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def _ratio(ratio: Interval) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _first(paired: Paired, name: str) -> str:
    return f"{median(run.first_s for run in paired.runs[name]):.2f}"


def _later(paired: Paired, name: str) -> str:
    found = paired.later_ratio(name, PLAIN) if PLAIN in paired.runs else None
    return "" if found is None else _ratio(found)


def _trials(measured: Measured) -> list[str]:
    parts = [
        f"{name}: " + ", ".join(f"{variant} {speed:.1f}" for variant, speed in tried.items())
        for name, tried in measured.trials.items()
        if len(tried) > 1
    ]
    return ["", "Tried, tokens/s: " + "; ".join(parts) + "."] if parts else []


def draw(head: dict[str, Any], found: Sequence[Measured], path: Path) -> bool:
    """Bars over systems for one number of sessions, lines over sessions for several; a panel for each temperature and context.

    False without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(m.setting.temperature, m.setting.context) for m in found})
    names = list(dict.fromkeys(name for m in found for name in m.paired.runs))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(max(5.0, 3.9 * len(panels)), 3.6), squeeze=False, sharey=True
    )
    for axis, (temperature, context) in zip(axes[0], panels, strict=True):
        mine = [m for m in found if (m.setting.temperature, m.setting.context) == (temperature, context)]
        for i, name in enumerate(names):
            has = [m for m in mine if name in m.paired.runs]
            x = [m.setting.sessions for m in has]
            y = [m.paired.tokens_per_s(name) for m in has]
            colour = COLOURS[i % len(COLOURS)]
            if len(mine) == 1:
                axis.bar([i] * len(y), y, color=colour, label=name)
            else:
                axis.plot(x, y, "o-", ms=3, color=colour, label=name)
        if len(mine) == 1:
            axis.set_xticks([])
        else:
            axis.set(xscale="log", yscale="log", xlabel="sessions")
            axis.set_xticks([m.setting.sessions for m in mine], [str(m.setting.sessions) for m in mine])
        axis.set_title(f"T = {temperature:g}, " + (f"{context} tokens" if context else "short prompts"), fontsize=9)
    axes[0][0].set_ylabel("tokens per second, all sessions")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncol=2, fontsize=7)
    figure.suptitle(_caption(head), fontsize=8)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return True
