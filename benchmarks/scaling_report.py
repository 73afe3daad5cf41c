"""Signals for scaling drafters, compared: `python -m benchmarks.scaling_report --out FOLDER` writes tables and plots.

Load: 12 sessions, 96 from 300 s, 12 again from 1 200 s. Every signal drives the same model of the HPA with the chart's behaviour.
`--fit` takes the times of a round from real services (`rootward bench rounds`). Such rounds are short: they are simulated so many times
longer that one takes 0.8 s, and what is told of them is scaled back. Scrapes, syncs and starts of pods stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from benchmarks.environment import described
from benchmarks.hpa import DEFAULT_UP, Autoscaler, Policy, Rules, Spec, Target
from benchmarks.rounds_fit import Fit
from benchmarks.scaling import Outcome, Plan, Pool, Seen, Signal, Work

DOWN = Rules(180, (Policy("Pods", 2, 60), Policy("Percent", 20, 60)), "Min")
PEAK, REST = 96, 12
UTILISATION = 0.7
MOST = 40
SIMULATED_ROUND_S = 0.8


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
    emptiest_goes: bool = False


def schemes(work: Work) -> list[Scheme]:
    demand, busy, stall = Target("AverageValue", work.rows * UTILISATION), Target("Value", 0.85), Target("Value", 0.10)

    def drafting(seen: Seen) -> float:
        """Rows in flight; growth ahead of the verdict fills them where drafting overlaps verifying."""
        return work.width * (seen.new.sessions if work.overlap else seen.new.busy)

    return [
        Scheme("D = N·A/R0", lambda s: [s.demand], (demand,)),
        Scheme("D + both guards (default)", lambda s: [s.demand, s.busy, s.stall], (demand, busy, stall)),
        Scheme("rows busy alone", lambda s: [s.busy], (Target("Value", UTILISATION),)),
        Scheme("in flight + queued", lambda s: [drafting(s) + work.width * s.new.queued], (demand,)),
        Scheme("queue depth ÷ 5", lambda s: [float(s.new.queued)], (Target("AverageValue", 5.0),)),
        Scheme("mean queue time, S/10", lambda s: [s.queue_s], (Target("Value", work.draft_s / 10),)),
        Scheme("mean queue time, S/2", lambda s: [s.queue_s], (Target("Value", work.draft_s / 2),)),
        Scheme("stall ratio alone", lambda s: [s.stall], (stall,)),
        Scheme("D, sessions pinned", lambda s: [s.demand], (demand,), rebalance=False),
        Scheme("D, the emptiest goes first", lambda s: [s.demand], (demand,), emptiest_goes=True),
    ]


def fixed(pods: int) -> Scheme:
    return Scheme(f"{pods} fixed", None, pods=pods)


def run(scheme: Scheme, work: Work, seed: int, load: Callable[[float], int] = step, end_s: float = 2400.0) -> Outcome:
    autoscaler = Autoscaler(Spec(scheme.targets, 1, MOST, DEFAULT_UP, DOWN)) if scheme.signal else None
    plan = Plan(load, end_s, pods=scheme.pods, rebalance=scheme.rebalance, emptiest_goes=scheme.emptiest_goes)
    return Pool(work, plan, autoscaler, scheme.signal, seed).run()


def optimum(work: Work) -> int:
    """The fewest pods at the peak with which demand fills no more than u of their rows."""
    for pods in range(1, MOST):
        pool = Pool(work, Plan(lambda now_s: PEAK, 300.0, pods=pods), None, None, 0)
        pool.run()
        demand = Seen(pool.scrapes[0], pool.scrapes[-1], work).demand
        if demand is not None and demand <= pods * work.rows * UTILISATION:
            return pods
    return MOST


def slowed(work: Work) -> tuple[Work, float]:
    """(rounds of 0.8 s, how many times longer that is): as many events for any services."""
    times = SIMULATED_ROUND_S / (work.draft_s + work.verify_s)
    return replace(work, draft_s=times * work.draft_s, verify_s=times * work.verify_s), times


def row(
    scheme: Scheme, work: Work, seeds: range, best: int, load: Callable[[float], int] = step, times: float = 1.0
) -> dict[str, float]:
    """Means over seeds. times: how many times longer rounds were simulated than they are."""
    outcomes = [run(scheme, work, seed, load) for seed in seeds]
    return {
        "peak": mean(max(o.wanted) for o in outcomes),
        "short_s": mean(o.short_s(best, PEAK) for o in outcomes),
        "changes": mean(o.changes for o in outcomes),
        "swings": mean(o.swings for o in outcomes),
        "pod_s": mean(o.pod_s for o in outcomes),
        "stall_ms": mean(o.stall_ms for o in outcomes) / times,
        "rounds": mean(o.rounds for o in outcomes) * times,
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


def report(work: Work, seeds: range, times: float, out: Path, title: str) -> tuple[str, dict[str, object]]:
    """(tables, what they were made of) of one way to draft; plots beside them."""
    best = optimum(work)
    every = (*schemes(work), *(fixed(n) for n in (2, 4, 6, 9, 12, 16, 24)))
    rows = {s.name: row(s, work, seeds, best, times=times) for s in every}
    for load in (ramp, wave):
        rows |= {f"{s.name}, {load.__name__}": row(s, work, seeds, best, load, times) for s in schemes(work)[:2]}
    plot_time(work, out / f"replicas_{title}.png")
    plot_cost({name: r for name, r in rows.items() if not name.endswith(("ramp", "wave"))}, out / f"cost_{title}.png")
    text = f"## {title}: optimum at the peak {best} pods\n\n{table(rows)}\n"
    return text, {"work": repr(work), "times": times, "optimum": best, "rows": rows}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--fit", type=Path, help="rounds-PAIR.json of `rootward bench rounds`")
    parser.add_argument("--verifier-sessions", type=int, default=8, help="of each verifier, for --fit (default 8)")
    return parser


def main() -> None:
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    work, times, source = Work(), 1.0, "the design"
    if options.fit:
        found = json.loads(options.fit.read_text(encoding="utf-8"))
        work, times = slowed(Fit(**found["fit"]).work(options.verifier_sessions))
        source = f"{options.fit.name}, {found['hardware']}, {found['date']}"
    text, data = [f"Times of a round: {source}.\n"], {}
    for title, overlap in (("lock-step", False), ("overlap", True)):
        tables, data[title] = report(replace(work, overlap=overlap), range(options.seeds), times, options.out, title)
        text.append(tables)
    (options.out / "tables.md").write_text("\n".join(text), encoding="utf-8")
    (options.out / "scaling.json").write_text(
        json.dumps({"environment": described(), **data}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
