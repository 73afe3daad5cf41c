"""A drafter that cheats: it declares its distributions as an honest one does, and draws from others.

    python -m benchmarks.dishonest --cheat argmax --model DRAFT --listen HOST:PORT

Operators test with it that the audit of drafters raises its alarm. All other options are those of the drafter.

    argmax[:SHARE]   the likeliest token (in this share of the draws)
    temperature:T    at another temperature
    best-of:N        the best of N draws by target over draft; needs --target MODEL
    peek             from the target's distribution; needs --target MODEL
    boost:TOKENS     some tokens with three times their weight: ids with commas between, or a share of the vocabulary as 0.1
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rootward.core.arrays import Floats, Ints
from rootward.core.distribution import DraftDistribution

Cheat = Callable[[DraftDistribution, np.random.Generator], int]
FAVOUR = 3.0
KINDS = ("argmax", "temperature", "best-of", "peek", "boost")


class PeekedRow(DraftDistribution):
    """A declared row that knows the target's. target float[V]: its masses, in any unit."""

    target: Floats

    def without(self, tokens: Iterable[int]) -> DraftDistribution:
        return peeked(super().without(tokens), self.target)

    def after(self, num_atoms: int) -> DraftDistribution:
        return peeked(super().after(num_atoms), self.target)


def peeked(row: DraftDistribution, target: Floats) -> PeekedRow:
    known = PeekedRow._of(row.ids, row.weight)
    assert isinstance(known, PeekedRow)
    object.__setattr__(known, "target", target)
    return known


def cheat_of(spec: str) -> Cheat:
    """The function by which a dishonest drafter draws. ValueError: not one of the cheats above."""
    kind, _, value = spec.partition(":")
    if kind not in KINDS:
        raise ValueError(f"cheat: {spec!r}; choose from {', '.join(KINDS)}")
    if kind == "argmax":
        share = float(value or 1.0)
        return lambda row, rng: (
            int(row.ids[row.weight.argmax()]) if rng.random() < share else _drawn(row, row.weight, rng)
        )
    if kind == "temperature":
        power = 1.0 / float(value)
        return lambda row, rng: _drawn(row, row.weight.astype(np.float64) ** power, rng)
    if kind == "best-of":
        num = int(value)
        return lambda row, rng: _best(row, [_drawn(row, row.weight, rng) for _ in range(num)])
    if kind == "peek":
        return lambda row, rng: _drawn(row, _target(row)[row.ids] + 1e-12, rng)
    return _boost(value)


def _boost(value: str) -> Cheat:
    if "." in value:
        share = float(value)
        return lambda row, rng: _drawn(row, np.where(row.ids % 1000 < 1000 * share, FAVOUR, 1.0) * row.weight, rng)
    favoured = [int(token) for token in value.split(",")]
    return lambda row, rng: _drawn(row, np.where(np.isin(row.ids, favoured), FAVOUR, 1.0) * row.weight, rng)


def _drawn(row: DraftDistribution, weight: Floats | Ints, rng: np.random.Generator) -> int:
    cumulative = np.cumsum(weight, dtype=np.float64)
    place = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(row.ids[min(place, len(row) - 1)])


def _best(row: DraftDistribution, tokens: Sequence[int]) -> int:
    ratio = {token: _target(row)[token] / row.weight[row.ids == token][0] for token in tokens}
    return max(tokens, key=lambda token: ratio[token])


def _target(row: DraftDistribution) -> Floats:
    if not isinstance(row, PeekedRow):
        raise ValueError("target: None; best-of and peek need --target MODEL")
    return row.target


def install(cheat: Cheat, seed: int = 0) -> None:
    """From now on every draw in this process cheats."""
    rng = np.random.default_rng(seed)

    def draw(row: DraftDistribution, words: Iterable[int]) -> int:
        return cheat(row, rng)

    DraftDistribution.draw = draw  # type: ignore[method-assign, assignment]


def install_peeking(model: Any) -> None:
    """From now on every row that a drafter in this process declares knows the target's (a `LanguageModel`): a forward over the whole text
    for each row."""
    grower: Any = importlib.import_module("rootward.engine.grower")
    texts: dict[int, list[int]] = {}
    tree_of, reroot, expand, rows_of = grower.Grower._tree_of, grower.Grower._reroot, grower._expand, grower.rows_of
    asked: list[Any] = []

    def peeking_tree_of(self: Any, key: Any, message: Any) -> Any:
        growing = tree_of(self, key, message)
        texts[id(growing)] = list(message.prefix)
        return growing

    def peeking_reroot(self: Any, growing: Any, tokens: Sequence[int]) -> None:
        texts[id(growing)].extend(tokens)
        reroot(self, growing, tokens)

    def peeking_expand(group: Sequence[Any], found: Any) -> None:
        asked[:] = group
        expand(group, found)

    def peeking_rows(*about: Any) -> list[DraftDistribution]:
        rows = rows_of(*about)
        return [peeked(row, _row_of(model, _text(one, texts))) for row, one in zip(rows, asked, strict=True)]

    grower.Grower._tree_of, grower.Grower._reroot = peeking_tree_of, peeking_reroot
    grower._expand, grower.rows_of = peeking_expand, peeking_rows


def _text(one: Any, texts: dict[int, list[int]]) -> list[int]:
    """The committed text and the path to the node."""
    tree, node, path = one.growing.tree, one.node, []
    while node and node != tree.root_id:
        record = tree.at(node)
        path.append(record.token)
        node = record.parent
    return texts[id(one.growing)] + path[::-1]


def _row_of(model: Any, text: Sequence[int]) -> Floats:
    from rootward.ports import Rows

    slot = model.open()
    try:
        logits = model.forward([Rows.chain(slot, 0, tuple(text))], num_logits=[1])[0].double()
        row: Floats = logits.softmax(-1).numpy()
        return row
    finally:
        model.close(slot)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cheat", type=cheat_of, required=True, help=", ".join(KINDS))
    parser.add_argument("--target", help="the verifier's model, for best-of and peek")
    args, rest = parser.parse_known_args(argv)
    if args.target:
        from rootward.engine.loading import load_model

        install_peeking(load_model(args.target, max_slots=2))
    install(args.cheat)
    sys.argv = ["drafter_service", *rest]
    runpy.run_module("drafter_service", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
