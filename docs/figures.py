"""The figures of the site, as SVG: trees and rounds from objects of `rootward.core`, the services from the descriptors of the wire, plots
from the newest results in benchmarks/results.

Colours are those of the page's theme, light and dark: matplotlib writes a placeholder for each, which becomes a CSS variable (site.css).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rootward.core import Law, TokenTree, drafting, verification
from rootward.core.living_tree import LivingTree
from rootward.core.verification import Verdict
from rootward.v1 import drafter_pb2, generate_pb2, verifier_pb2

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

INK, FAINT, PAPER = "#010101", "#020202", "#030303"
ACCEPTED, BONUS, DRAFT, AHEAD, OTHER = "#040404", "#050505", "#060606", "#070707", "#080808"
VARIABLES = {
    INK: "--md-default-fg-color",
    FAINT: "--rw-faint",
    PAPER: "--md-default-bg-color",
    ACCEPTED: "--rw-accepted",
    BONUS: "--rw-bonus",
    DRAFT: "--rw-draft",
    AHEAD: "--rw-ahead",
    OTHER: "--rw-other",
}
STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
}


# -- trees ----------------------------------------------------------------------------------------------------------------

WORDS = ("the", "cat", "dog", "sat", "ran", "on", "to", "mat")
# What follows each word, in the order of WORDS: of the target, and of a draft model that is a little wrong everywhere.
TARGET = np.array(
    [
        [0, 40, 30, 0, 0, 0, 0, 30],
        [0, 0, 0, 60, 30, 5, 5, 0],
        [0, 0, 0, 25, 65, 5, 5, 0],
        [5, 0, 0, 0, 0, 80, 15, 0],
        [10, 0, 0, 0, 0, 20, 70, 0],
        [90, 5, 5, 0, 0, 0, 0, 0],
        [85, 5, 5, 0, 0, 0, 0, 5],
        [5, 5, 0, 20, 20, 30, 20, 0],
    ]
)
P = 0.95 * TARGET / 100 + 0.05 / len(WORDS)
Q = 0.9 * P + 0.1 * np.roll(P, 1, axis=1)


def tree() -> str:
    """One tree, and what traversal verification does with it."""
    root = WORDS.index("the")
    drawn, draft = drafting.rsd_c(lambda path: Q[path[-1] if path else root], [2, 2, 1], np.random.default_rng(235))
    law = verification.law("traversal", drawn, _target_rows(drawn, root), draft)
    verdict = _drawn(law, lambda v: drawn.depth[v.stop] == 2)
    figure = Figure(layout="constrained", figsize=(8.2, 3.6))
    axes = _bare(figure.subplots())
    notes = [f"{mass:.0%}" for mass in law.stop]
    _draw_tree(axes, _Picture.of(drawn, root=root, verdict=verdict, notes=notes), levels=3)
    caption = (
        "A tree of ten draft tokens below “the”, drawn by <code>drafting.rsd_c</code>. The figure at a node is the "
        "probability that the round stops there (<code>verification.law</code>): "
        f"{law.block_efficiency:.2f} tokens are expected of this one pass of the target. "
        "One draw: the green path is accepted, and the orange bonus token is the target’s own."
    )
    return _svg(figure, "token tree", caption)


def round() -> str:
    """Three states of one living tree: grown, verified, committed."""
    root = WORDS.index("the")
    living = LivingTree(1, 0, vocab_size=len(WORDS), ahead_cap=8)
    rng = np.random.default_rng(2)

    def row(token: int) -> tuple[Any, Any]:
        ids = np.flatnonzero(Q[token])
        return ids, np.round(Q[token, ids] * 1000).astype(np.int64)

    def child(parent: int, *, guess: bool = False, word: str = "") -> int:
        above = living.at(parent)
        above.row = row(above.token if above.token >= 0 else root)
        taken = [living.nodes[c].token for c in above.children]
        left = np.array([0 if i in taken else weight for i, weight in zip(*above.row, strict=True)])
        token = WORDS.index(word) if word else int(rng.choice(above.row[0], p=left / left.sum()))
        return living.draw(parent, token, sampled=not guess, guess=guess)

    first, second = child(0), child(0)
    third = child(first)
    child(first)
    child(second)
    fourth = child(third)
    rows = living.snapshot(16)
    verified = rows.tree
    dense = np.zeros((len(verified), len(WORDS)))
    for i, found in enumerate(rows.rows):
        if found is not None:
            dense[i, found[0]] = found[1] / found[1].sum()
    law = verification.law("traversal", verified, _target_rows(verified, root), dense)
    stop = rows.ids.index(third)
    next_words = [word for word in np.argsort(-law.residual[stop]) if word != living.nodes[fourth].token]
    guess = child(third, guess=True, word=WORDS[int(next_words[0])])
    below = child(guess)
    child(below)
    verdict = _drawn(law, lambda v: v.stop == stop and v.bonus == next_words[0])

    figure = Figure(layout="constrained", figsize=(8.2, 5.8))
    panels = figure.subplots(3, 1, height_ratios=(4, 4, 1))
    grown = _Picture.living(living, root)
    _draw_tree(_bare(panels[0]), grown)
    _draw_tree(
        _bare(panels[1]), _Picture.living(living, root, verdict=Verdict(rows.ids[stop], verdict.bonus), guess=guess)
    )
    path = [*verified.path(stop), verdict.bonus]
    living.commit(path)
    _draw_tree(_bare(panels[2]), _Picture.living(living, path[-1]))
    titles = (
        "1  the drafter grows: six nodes for this round; below a predicted bonus token (dashed), two for the next",
        "2  the verifier checks the six in one pass: a path is accepted, a bonus token is drawn",
        "3  both commit: the bonus token is the new root, and what hangs below it is kept",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
    caption = (
        "One round on a <code>LivingTree</code>, of which drafter and verifier hold a replica each. Growth goes on while the target "
        "computes; the prediction came true here, so the next round has a tree at once."
    )
    return _svg(figure, "one round", caption)


def _target_rows(tree: TokenTree, root: int) -> Any:
    return np.stack([P[tree.token[node] if node else root] for node in range(len(tree))])


def _drawn(law: Law, wanted: Any) -> Verdict:
    """The first draw of a kind, of a fixed sequence."""
    for seed in range(100_000):
        verdict = law.draw(*np.random.default_rng(seed).random(2))
        if wanted(verdict):
            return verdict
    raise LookupError("no such verdict in 100 000 draws")


@dataclass(frozen=True, slots=True)
class _Picture:
    """Nodes to draw: word, parent, note, colour, dashed. Parents come first; the root is first."""

    words: Sequence[str]
    parents: Sequence[int]
    notes: Sequence[str]
    colours: Sequence[str]
    dashed: Sequence[bool]

    @classmethod
    def of(cls, tree: TokenTree, *, root: int, verdict: Verdict, notes: Sequence[str]) -> _Picture:
        path, node = {0}, verdict.stop
        while node:
            path.add(node)
            node = int(tree.parent[node])
        colours = [ACCEPTED if i in path and i else INK if not i else DRAFT for i in range(len(tree))]
        return cls(
            words=[WORDS[root], *(WORDS[token] for token in tree.token[1:]), WORDS[verdict.bonus]],
            parents=[*tree.parent.tolist(), verdict.stop],
            notes=[*notes, ""],
            colours=[*colours, BONUS],
            dashed=[False] * (len(tree) + 1),
        )

    @classmethod
    def living(cls, tree: LivingTree, root: int, *, verdict: Verdict | None = None, guess: int = 0) -> _Picture:
        """All live nodes; with a verdict the accepted path and the bonus token, which is the node `guess`, are marked."""
        ids = [tree.root_id, *tree.nodes]
        index = {node: i for i, node in enumerate(ids)} | {0: 0}
        accepted, node = set(), verdict.stop if verdict else 0
        while node:
            accepted.add(node)
            node = tree.nodes[node].parent

        def colour(node: int) -> str:
            if node in accepted:
                return ACCEPTED
            if verdict and node == guess:
                return BONUS
            return AHEAD if tree.nodes[node].head else DRAFT

        return cls(
            words=[WORDS[root], *(WORDS[tree.nodes[node].token] for node in ids[1:])],
            parents=[-1, *(index[tree.nodes[node].parent] for node in ids[1:])],
            notes=[""] * len(ids),
            colours=[INK, *(colour(node) for node in ids[1:])],
            dashed=[False, *(tree.nodes[node].guess for node in ids[1:])],
        )


def _draw_tree(axes: Axes, picture: _Picture, *, levels: int = 5) -> None:
    """Depth from left to right, leaves one below the other."""
    depth, height = [0] * len(picture.words), [0.0] * len(picture.words)
    children: list[list[int]] = [[] for _ in picture.words]
    for node, parent in enumerate(picture.parents):
        if parent >= 0:
            depth[node] = depth[parent] + 1
            children[parent].append(node)
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        if not children[node]:
            height[node] = -float(leaves)
            leaves += 1
        else:
            heights = [place(child) for child in children[node]]
            height[node] = (heights[0] + heights[-1]) / 2
        return height[node]

    place(0)
    for node, parent in enumerate(picture.parents):
        if parent >= 0:
            colour = picture.colours[node]
            width = 2.4 if colour in (ACCEPTED, BONUS) else 1.2
            style = "--" if picture.dashed[node] else "-"
            ends = [depth[parent] + 0.22, depth[node] - 0.22], [height[parent], height[node]]
            axes.plot(*ends, color=colour, linewidth=width, linestyle=style, zorder=1)
    for node, word in enumerate(picture.words):
        box = {
            "boxstyle": "round,pad=0.35",
            "facecolor": PAPER,
            "edgecolor": picture.colours[node],
            "linewidth": 1.6,
            "linestyle": "--" if picture.dashed[node] else "-",
        }
        axes.text(depth[node], height[node], word, ha="center", va="center", bbox=box, zorder=2)
        if picture.notes[node]:
            axes.text(depth[node], height[node] - 0.5, picture.notes[node], ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.4, max(levels, *depth) + 0.4)
    axes.set_ylim(-leaves + 0.3, 0.6)


# -- services -------------------------------------------------------------------------------------------------------------


def services() -> str:
    """Who calls whom, by the names in proto/."""
    inference = _methods(generate_pb2, "Inference", "GenerateStream")
    generate = _methods(verifier_pb2, "Verifier", "Generate", "Feed")
    session = _methods(drafter_pb2, "Drafter", "Session")
    figure = Figure(layout="constrained", figsize=(9.6, 3.6))
    axes = _bare(figure.subplots())
    boxes = {
        "client": (0.0, 1.0, "clients\nSDK, OpenAI, curl"),
        "gateway": (2.05, 1.0, "gateway\ntext ↔ tokens\nadmission, routing"),
        "redis": (2.05, -0.2, "Redis\nleases, committed log"),
        "verifier": (4.1, 1.0, "verifier\nlarge model, KV\nverdicts"),
        "drafter 1": (5.95, 1.7, "drafter\nsmall model"),
        "drafter 2": (5.95, 0.3, "drafter\nsmall model"),
    }
    for x, y, text in boxes.values():
        box = {"boxstyle": "round,pad=0.45", "facecolor": PAPER, "edgecolor": DRAFT, "linewidth": 1.4}
        axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box, zorder=3)
    _arrow(axes, (0.62, 1.08), (1.42, 1.08), f"HTTP\n{inference}", above=True)
    _arrow(axes, (1.42, 0.92), (0.62, 0.92), "text", above=False)
    _arrow(axes, (2.68, 1.08), (3.52, 1.08), generate, above=True)
    _arrow(axes, (3.52, 0.92), (2.68, 0.92), "committed\ntokens", above=False)
    _arrow(axes, (4.68, 1.25), (5.5, 1.66), "", above=True)
    _arrow(axes, (4.68, 0.75), (5.5, 0.34), "", above=False)
    axes.text(5.15, 1.0, f"{session}\ntree growth, commits", ha="left", va="center", fontsize=8)
    _arrow(axes, (2.05, 0.5), (2.05, 0.12), "", above=True)
    axes.text(2.12, 0.31, "behind the stream", ha="left", va="center", fontsize=8)
    axes.set_xlim(-0.6, 6.5)
    axes.set_ylim(-0.6, 2.1)
    caption = (
        "Calls go to the right, results come back on the same stream. Each service works without the one to its right."
    )
    return _svg(figure, "the services", caption)


def _methods(module: Any, service: str, *names: str) -> str:
    """Names of calls, as the wire has them: KeyError for one that is gone."""
    methods = module.DESCRIPTOR.services_by_name[service].methods_by_name
    return ", ".join(methods[name].name for name in names)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str, *, above: bool) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.2})
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + (0.06 if above else -0.06))
    axes.text(*middle, text, ha="center", va="bottom" if above else "top", fontsize=8)


# -- results --------------------------------------------------------------------------------------------------------------

NAMES = {"rootward": "Rootward", "llama.cpp": "llama.cpp", "vllm": "vLLM", "transformers": "transformers"}


def _newest_file(kind: str, name: str) -> Path:
    """The newest result of a benchmark. FileNotFoundError if there is none."""
    found = sorted(RESULTS.glob(f"*-{kind}/{name}"))
    if not found:
        raise FileNotFoundError(f"benchmarks/results: no *-{kind}/{name}")
    return found[-1]


def _newest(kind: str, name: str) -> Mapping[str, Any]:
    """Its content."""
    result: Mapping[str, Any] = json.loads(_newest_file(kind, name).read_text(encoding="utf-8"))
    return result


def peers() -> str:
    """Tokens per second beside other engines, on a processor with AVX-512 bfloat16."""
    return _beside_others("2026-11-30-zen5/peers.json")


def peers_avx2() -> str:
    """The same on a processor with AVX2 alone."""
    return _beside_others("2026-11-29-avx2-balanced/peers-6.json")


def _beside_others(name: str) -> str:
    result: Mapping[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    caption = f"{result['model']}, {result['dtype']}, {result['max_tokens']} tokens per answer. {_origin(result)}"
    drafts = "speculation, Rootward's with the shipped head, the others' with n-grams"
    return _svg(_engines(result, drafts=drafts), f"engines on {result['hardware'].rpartition(',')[0]}", caption)


def inflated() -> str:
    """A target whose step is long beside that of its draft."""
    result = _newest("inflated", "default.json")
    model = "The shipped target inflated to the cost of 300 M parameters, and the shipped draft model"
    caption = f"{model}, {result['dtype']}, {result['max_tokens']} tokens per answer. {_origin(result)}"
    return _svg(_engines(result, drafts="with the draft model"), "a long step with a draft model", caption)


def _engines(result: Mapping[str, Any], *, drafts: str) -> Figure:
    """A panel for every temperature and batch."""
    speed = {(s["system"], s["mode"], s["temperature"], s["batch"]): s["tokens_per_s"] for s in result["series"]}
    cases = sorted({key[2:] for key in speed})
    figure = Figure(layout="constrained", figsize=(8.2, 2.1 * ((len(cases) + 1) // 2)))
    panels = figure.subplots((len(cases) + 1) // 2, 2, squeeze=False).flat
    systems = [name for name in NAMES if any(key[0] == name for key in speed)]
    for axes, (temperature, batch) in zip(panels, cases, strict=False):
        for i, system in enumerate(systems):
            for offset, mode, alpha in ((-0.19, "plain", 0.45), (0.19, "speculative", 1.0)):
                value = speed.get((system, mode, temperature, batch))
                if value is not None:
                    colour = ACCEPTED if system == "rootward" else OTHER
                    axes.barh(i + offset, value, 0.36, color=colour, alpha=alpha)
                    axes.text(value, i + offset, f" {value:.0f}", va="center", fontsize=8)
        axes.set_yticks(range(len(systems)), [NAMES[system] for system in systems])
        axes.set_ylim(len(systems) - 0.5, -0.5)
        axes.set_title(f"T = {temperature:g}, {batch} at once", loc="left", fontsize=10)
        axes.margins(x=0.12)
    figure.supxlabel(f"tokens/s   (pale: plain decoding, full: {drafts})", fontsize=9)
    return figure


def strategies() -> str:
    """Tokens per target pass of draft strategies and rules."""
    result = _newest("strategies", "strategies.json")
    rules = {
        "traversal": ("o", ACCEPTED),
        "token": ("s", DRAFT),
        "block": ("^", BONUS),
        "multi_step": ("v", AHEAD),
        "match": ("x", INK),
    }
    measured = [cell for cell in result["cells"] if cell["tokens_per_pass"] is not None]
    names = list(dict.fromkeys(cell["drafts"] for cell in measured))
    figure = Figure(layout="constrained", figsize=(8.2, 0.34 * len(names) + 1.1))
    axes = figure.subplots()
    for rule, (marker, colour) in rules.items():
        cells = [cell for cell in measured if cell["rule"] == rule]
        values = [cell["tokens_per_pass"] for cell in cells]
        axes.plot(
            values, [names.index(cell["drafts"]) for cell in cells], marker, color=colour, label=rule, markersize=6
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="both")
    axes.set_xlabel("tokens per target pass, T = 1")
    axes.legend(ncols=len(rules), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return _svg(figure, "tokens per target pass", f"The shipped pair of models, 16 nodes a round. {_origin(result)}")


COMPARED = {
    "zero": "a near drafter",
    "waiting": "waiting for trees",
    "not ahead": "no growth ahead",
}  # names of its claims


def distance() -> str:
    """What growing ahead gains with a distant drafter."""
    result = _newest("distance", "distance.json")
    figure = Figure(layout="constrained", figsize=(8.2, 2.2))
    axes = figure.subplots()
    labels: list[str] = []
    for rtt, claims in result["claims"].items():
        for name, claim in claims.items():
            rule, _, other = name.partition(" of ")
            labels.append(f"{rule}, against {COMPARED[other]}, {rtt} ms")
            at, colour = len(labels) - 1, ACCEPTED if other == "waiting" else DRAFT
            axes.plot([claim["low"], claim["high"]], [at, at], color=colour, linewidth=2)
            axes.plot(claim["median"], at, "o", color=colour)
    axes.axvline(1.0, color=FAINT)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ratio of tokens per second: median and its interval")
    return _svg(
        figure,
        "distant drafters",
        f"A drafter that grows ahead, some milliseconds of round trip away. {_origin(result)}",
    )


def lookup() -> str:
    """Tokens per round of drafters without a model."""
    result = _newest("lookup", "lookup.json")
    sources = {"ngram:": ("o", ACCEPTED), "recycling:": ("s", DRAFT), "ngram+recycling:": ("^", BONUS)}
    figure = Figure(layout="constrained", figsize=(8.2, 2.8))
    for axes, temperature in zip(figure.subplots(1, 2, sharey=True), (0.0, 1.0), strict=True):
        for source, (marker, colour) in sources.items():
            rows = [r for r in result["results"] if r["source"] == source and r["temperature"] == temperature]
            axes.plot(
                [r["budget"] for r in rows],
                [r["block_efficiency"] for r in rows],
                f"{marker}-",
                color=colour,
                label=source,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([8, 16, 32], ["8", "16", "32"])
        axes.minorticks_off()
        axes.set_xlabel("nodes per round")
        axes.set_title(f"T = {temperature:g}", loc="left", fontsize=10)
        axes.grid(axis="y")
    figure.axes[0].set_ylabel("tokens per round")
    figure.axes[0].set_ylim(bottom=0.9)
    figure.axes[1].legend(fontsize=9)
    caption = f"The shipped target on its own texts: small and repetitive when greedy, which flatters look-ups. {_origin(result)}"
    return _svg(figure, "drafters without a model", caption)


def audit() -> str:
    """Draws until a dishonest drafter is caught."""
    result = _newest("audit", "audit.json")
    caught = {name: case for name, case in result["shipped pair"].items() if "median" in case}
    order = sorted(caught, key=lambda name: float(caught[name]["median"]))
    figure = Figure(layout="constrained", figsize=(8.2, 2.6))
    axes = figure.subplots()
    for i, name in enumerate(order):
        draws = caught[name]["draws"]
        axes.plot([min(draws), max(draws)], [i, i], color=DRAFT, linewidth=2)
        axes.plot(caught[name]["median"], i, "o", color=ACCEPTED)
    axes.set_yticks(range(len(order)), order)
    axes.set_xscale("log")
    axes.set_xlabel("draws until the alarm: median and range of five")
    axes.grid(axis="x")
    return _svg(figure, "audit of drafters", f"How each drafter cheats is in the first column. {_origin(result)}")


def heads_over_the_wire() -> str:
    """A draft head in the verifier and in drafters at distances."""
    result = _newest("heads-over-the-wire", "bfloat16.json")
    names = list(dict.fromkeys(run["system"] for run in result["runs"]))
    figure = Figure(layout="constrained", figsize=(8.2, 2.4))
    axes = figure.subplots()
    for i, name in enumerate(names):
        speeds = sorted(run["tokens_per_s"] for run in result["runs"] if run["system"] == name)
        axes.plot([speeds[0], speeds[-1]], [i, i], color=DRAFT, linewidth=2)
        axes.plot(np.median(speeds), i, "o", color=ACCEPTED)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    axes.set_xlabel("tokens/s: median and range of the turns")
    return _svg(figure, "a draft head over the wire", f"SmolLM2-135M-Instruct with its draft head. {_origin(result)}")


def plan() -> str:
    """Speed-ups that `rootward plan` forecast, and those measured."""
    files = sorted(_newest_file("plan", "demo.json").parent.glob("*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    rows = [(result["name"], row) for result in results for row in result["rows"] if row["temperature"] == 0]
    figure = Figure(layout="constrained", figsize=(8.2, 0.8 + 0.28 * len(rows)))
    axes = figure.subplots()
    for name, marker, colour in (("forecast", "s", DRAFT), ("measured", "o", ACCEPTED)):
        values = [row[f"speedup_{name}"] for _, row in rows]
        axes.plot(values, range(len(values)), marker, color=colour, label=name)
    axes.set_yticks(range(len(rows)), [f"{name}, {row['load']} at once" for name, row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_xlabel("speed-up by speculation, automatic, T = 0")
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    commits = ", ".join(dict.fromkeys(result["commit"][:7] for result in results))
    caption = f"{results[-1]['hardware']}, {results[-1]['date']}, commits {commits}."
    return _svg(figure, "forecast and measured", caption)


def routing() -> str:
    """Time to first token with and without hints of KV."""
    found = {
        label: _newest("routing", f"{name}.json") for label, name in (("with hints", "with"), ("without", "without"))
    }
    figure = Figure(layout="constrained", figsize=(8.2, 1.9))
    axes = figure.subplots()
    for i, result in enumerate(found.values()):
        axes.plot(result["first_token_ms_median"], i, "o", color=ACCEPTED, label="median" if i == 0 else None)
        axes.plot(result["first_token_ms_p95"], i, "s", color=DRAFT, label="95th percentile" if i == 0 else None)
    labels = [f"{label}: {result['cached_share']:.0%} of prompts cached" for label, result in found.items()]
    axes.set_yticks(range(len(found)), labels)
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    axes.set_xlabel("time to first token, ms")
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure, "routing by KV hints", f"The same requests replayed. {_origin(found['with hints'])}")


def _origin(result: Mapping[str, Any]) -> str:
    return f"{result['hardware']}, {result['date']}, commit {result['commit'][:7]}."


# -- SVG ------------------------------------------------------------------------------------------------------------------


def _bare(axes: Axes) -> Axes:
    axes.set_axis_off()
    return axes


def _svg(figure: Figure, title: str, caption: str) -> str:
    """An HTML figure that takes the colours of the page."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    drawing = file.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>\s*", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r' width="[^"]*" height="[^"]*"', "", drawing, count=1)
    drawing = re.sub(r'id="([^"]+)"', lambda found: f'id="{_id(title)}-{found[1]}"', drawing)
    drawing = re.sub(r'(href="#|url\(#)', lambda found: f"{found[1]}{_id(title)}-", drawing)
    for placeholder, variable in VARIABLES.items():
        drawing = drawing.replace(placeholder, f"var({variable})")
    drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    drawing = "\n".join(line for line in drawing.splitlines() if line.strip())
    return (
        f'<figure class="drawn" markdown="0">\n<div>\n{drawing}\n</div>\n<figcaption>{caption}</figcaption>\n</figure>'
    )


def _id(title: str) -> str:
    return re.sub(r"\W+", "-", title)


mpl.rcParams.update(STYLE)
