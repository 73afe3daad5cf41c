"""Signals for scaling drafters, compared: `python -m rootward.bench.scaling_report --out FOLDER` writes tables and plots.

Load: 12 sessions, 96 from 300 s, 12 again from 1 200 s. Every signal drives the same model of the HPA with the chart's behaviour.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from rootward.bench.environment import described
from rootward.bench.hpa import DEFAULT_UP, Autoscaler, Policy, Rules, Spec, Target
from rootward.bench.scaling import Outcome, Plan, Pool, Seen, Signal, Work

DOWN = Rules(180, (Policy("Pods", 2, 60), Policy("Percent", 20, 60)), "Min")
PEAK, REST = 96, 12
UTILISATION = 0.7
MOST = 40


def step(now_s: float) -> int:
    return PEAK if 300 <= now_s < 1200 else REST


def ramp(now_s: float) -> int:
    """Ten minutes up, ten down."""
    return round(REST + (PEAK - REST) * max(0.0, min(1.0, (now_s - 300) / 600, (2100 - now_s) / 600)))


def wave(now_s: float) -> int:
    """A period of ten minutes."""
    return round((PEAK + REST) / 2 - (PEAK - REST) / 2 * math.cos(2 * math.pi * now_s / 600))


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to scale: what is measured, against which targets."""

    name: str
    signal: Signal | None
    targets: tuple[Target, ...] = ()
    rebalance: bool = True
    pods: int = 2


def schemes(work: Work) -> list[Scheme]:
    demand, busy, stall = Target("AverageValue", work.rows * UTILISATION), Target("Value", 0.85), Target("Value", 0.10)

    def drafting(seen: Seen) -> float:
        """Rows in flight; growth ahead of the verdict fills them where drafting overlaps verifying."""
        return float(seen.new.sessions) if work.overlap else float(seen.new.busy)

    return [
        Scheme("D = N·A/R0", lambda s: [s.demand], (demand,)),
        Scheme("D + both guards (default)", lambda s: [s.demand, s.busy, s.stall], (demand, busy, stall)),
        Scheme("rows busy alone", lambda s: [s.busy], (Target("Value", UTILISATION),)),
        Scheme("in flight + queued", lambda s: [drafting(s) + s.new.queued], (demand,)),
        Scheme("queue depth ÷ 5", lambda s: [float(s.new.queued)], (Target("AverageValue", 5.0),)),
        Scheme("mean queue time, S/10", lambda s: [s.queue_s], (Target("Value", work.draft_s / 10),)),
        Scheme("mean queue time, S/2", lambda s: [s.queue_s], (Target("Value", work.draft_s / 2),)),
        Scheme("stall ratio alone", lambda s: [s.stall], (stall,)),
        Scheme("D, sessions pinned", lambda s: [s.demand], (demand,), rebalance=False),
    ]


def fixed(pods: int) -> Scheme:
    return Scheme(f"{pods} fixed", None, pods=pods)


def run(scheme: Scheme, work: Work, seed: int, load: Callable[[float], int] = step, end_s: float = 2400.0) -> Outcome:
    autoscaler = Autoscaler(Spec(scheme.targets, 1, MOST, DEFAULT_UP, DOWN)) if scheme.signal else None
    plan = Plan(load, end_s, pods=scheme.pods, rebalance=scheme.rebalance)
    return Pool(work, plan, autoscaler, scheme.signal, seed).run()


def optimum(work: Work) -> int:
    """Pods at the peak with which u of the rows would be busy if nobody queued. The longer of two random times, by simulation."""
    calm = run(fixed(MOST), work, 0)
    seconds_of_round = sum(calm.sessions) * 15.0 / calm.rounds
    return math.ceil(PEAK * work.draft_s / seconds_of_round / (work.rows * UTILISATION))


def row(scheme: Scheme, work: Work, seeds: range, best: int, load: Callable[[float], int] = step) -> dict[str, float]:
    outcomes = [run(scheme, work, seed, load) for seed in seeds]
    return {
        "peak": mean(max(o.wanted) for o in outcomes),
        "short_s": mean(o.short_s(best, PEAK) for o in outcomes),
        "changes": mean(o.changes for o in outcomes),
        "swings": mean(o.swings for o in outcomes),
        "pod_s": mean(o.pod_s for o in outcomes),
        "stall_ms": mean(o.stall_ms for o in outcomes),
        "rounds": mean(o.rounds for o in outcomes),
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| signal | peak | short s | changes | swings | pod-s | stall ms | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        cells = [f"{r['peak']:.3g}", f"{r['short_s']:.0f}", f"{r['changes']:.1f}", f"{r['swings']:.1f}"]
        cells += [f"{r['pod_s'] / 1e3:.1f} k", f"{r['stall_ms']:.0f}", f"{r['rounds'] / 1e3:.1f} k"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_time(work: Work, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for scheme in schemes(work):
        if scheme.name in ("D, sessions pinned", "mean queue time, S/2"):
            continue
        outcome = run(scheme, work, 0)
        axes.step(outcome.times, outcome.ready, where="post", label=scheme.name, lw=2 if "D" in scheme.name else 1)
    axes.axhline(optimum(work), color="grey", ls=":", label="optimum at the peak")
    axes.set(xlabel="seconds", ylabel="ready drafters", title="Sessions 12 → 96 at 300 s → 12 at 1 200 s")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_cost(rows: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    static = {name: r for name, r in rows.items() if "fixed" in name}
    axes.plot(
        [r["pod_s"] / 1e3 for r in static.values()],
        [r["stall_ms"] for r in static.values()],
        "k.-",
        label="fixed pools",
    )
    for name, r in rows.items():
        if name not in static:
            axes.plot(r["pod_s"] / 1e3, r["stall_ms"], "o", label=name)
    axes.set(
        xlabel="thousand pod-seconds",
        ylabel="mean stall of a round, ms (log)",
        yscale="log",
        title="What waiting costs",
    )
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--fit", type=Path, help="JSON with fields of Work, measured on real services")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    fitted = json.loads(options.fit.read_text(encoding="utf-8")) if options.fit else {}
    seeds, text, data = range(options.seeds), [], {}
    for overlap in (False, True):
        work = replace(Work(**fitted), overlap=overlap)
        best, title = optimum(work), "overlap" if overlap else "lock-step"
        rows = {
            s.name: row(s, work, seeds, best) for s in (*schemes(work), *(fixed(n) for n in (2, 4, 6, 9, 12, 16, 24)))
        }
        waves = {
            f"{s.name}, {load.__name__}": row(s, work, seeds, best, load)
            for load in (ramp, wave)
            for s in schemes(work)[:2]
        }
        text += [f"## {title}: optimum at the peak {best} pods", "", table(rows | waves), ""]
        data[title] = {"work": work.__repr__(), "optimum": best, "rows": rows | waves}
        plot_time(work, options.out / f"replicas_{title}.png")
        plot_cost(rows, options.out / f"cost_{title}.png")
    (options.out / "tables.md").write_text("\n".join(text), encoding="utf-8")
    (options.out / "scaling.json").write_text(
        json.dumps({"environment": described(), **data}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
