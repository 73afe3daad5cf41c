"""Which verification rule is lossless for which tree construction (algorithms.md, section 4), as a table with reasons for refusals.

    check_pair("rsd_c", "traversal")                       passes
    check_pair("rsd_c", "traversal", replacement=True)     ValueError: … declares another law than its siblings were drawn from …

A row is a way to make trees: a draft strategy (`requests.DraftStrategy`), a `requests.DraftMode`, or a modification of a tree.
Every cell was decided by exact enumeration; tests/statistical repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rootward.core.requests import DraftMode, DraftStrategy, Rule

Column = tuple[str, bool]  # (algorithm, replacement)

MATCH: Column = ("match", False)
TOKEN, TOKEN_COPIES = ("token", False), ("token", True)
TRAVERSAL, TRAVERSAL_COPIES = ("traversal", False), ("traversal", True)
MULTI_STEP, BLOCK = ("multi_step", True), ("block", False)
COLUMNS = (MATCH, TOKEN, TOKEN_COPIES, MULTI_STEP, TRAVERSAL, TRAVERSAL_COPIES, BLOCK)

WITHOUT = frozenset({MATCH, TOKEN, TRAVERSAL})
COPIES = frozenset({MATCH, TOKEN_COPIES, TRAVERSAL_COPIES})

NO_COPIES = (
    "declares another law than its siblings were drawn from: they are drawn without replacement; use replacement=False"
)
ARE_COPIES = "declares another law than its siblings were drawn from: they are independent copies; use replacement=True"
RANDOM_ORDER = "tries siblings in random order, which needs independent copies whose number was fixed beforehand"
NEEDS_CHAIN = "needs a chain; use traversal"
NOT_DRAWN = "treats chosen children as draws from a row; their law is one-hot, which replacement=False declares"
LOOKED = "needs trees that do not look at what they drop or reorder; these did, so only match may verify them"
DECLARED = "needs the law the children were drawn from; another one was declared, so only match may verify them"
SHARED_NOISE = (
    "needs fresh draws; noise shared with the target ties them together and to the coins, so only match may verify them"
)


@dataclass(frozen=True, slots=True)
class Construction:
    """One row of the table: the columns that are lossless, and why the others are not (`reason`, else by column)."""

    what: str
    lossless: frozenset[Column]
    reason: str = ""


_WITHOUT = Construction("children drawn without replacement in draw order", WITHOUT)
_CHOSEN = Construction("chosen children, one-hot laws", WITHOUT | {BLOCK})
_LOOKED = Construction("nodes dropped or reordered by what was drawn", frozenset({MATCH}), LOOKED)

TABLE: dict[str, Construction] = {
    "chain": Construction("a sampled chain", frozenset(COLUMNS)),
    # drawn without replacement
    "best_first": _WITHOUT,
    "rsd_c": _WITHOUT,
    "rsd_s": _WITHOUT,
    "iid_paths": _WITHOUT,
    DraftMode.SAMPLED.value: _WITHOUT,
    # drawn and chosen
    "greedy": Construction("one drawn child first, then chosen ones", WITHOUT),
    "chosen_last": Construction("chosen children after the drawn ones", WITHOUT),
    # independent copies
    "iid": Construction("independent copies, their number fixed beforehand", COPIES | {MULTI_STEP}),
    "iid_by_value": Construction("independent copies, grown by value", COPIES),
    "iid_shuffled": Construction("independent copies in random order", COPIES | {MULTI_STEP}),
    # chosen
    "top_k": _CHOSEN,
    "marginals": _CHOSEN,
    "n_gram": _CHOSEN,
    # only the target's own tokens may decide
    "coupled": Construction("children under shared noise", frozenset({MATCH}), SHARED_NOISE),
    "pruned": _LOOKED,
    "shuffled": _LOOKED,
    "chosen_called_drawn": Construction("chosen children tested by p/q", frozenset({MATCH}), DECLARED),
    "other_row_declared": Construction("another row declared than drawn from", frozenset({MATCH}), DECLARED),
}

_BY_COLUMN = {
    TOKEN: ARE_COPIES,
    TRAVERSAL: ARE_COPIES,
    TOKEN_COPIES: NO_COPIES,
    TRAVERSAL_COPIES: NO_COPIES,
    MULTI_STEP: RANDOM_ORDER,
    BLOCK: NEEDS_CHAIN,
}


def lossless_columns(construction: str) -> frozenset[Column]:
    """The (algorithm, replacement) pairs that are lossless for a construction, match as ("match", False)."""
    return _row(construction).lossless


def check_pair(construction: str, algorithm: str, replacement: bool = False) -> None:
    """ValueError, with the reason, if the rule would change the target's distribution.

    construction  a key of `TABLE`: a function of `drafting`, the value of a `requests.DraftMode`, or a modification of a tree
    algorithm     "match", or a name `verification.law` takes; match and block have no use for `replacement`
    """
    if reason := _reason(construction, algorithm, replacement):
        raise ValueError(f"algorithm: {algorithm}, replacement={replacement} {reason}")


def check_rule(strategy: DraftStrategy, mode: DraftMode, rule: Rule) -> None:
    """As `check_pair` for the strategy, mode and rule of a request. The message says what to request instead."""
    construction = strategy.name if mode.ratio and strategy.name != "best_first" else mode.value
    if mode is DraftMode.COUPLED and rule is not Rule.MATCH:  # no shape of the tree would help
        raise ValueError(f"rule: {rule.value} {_reason(construction, rule.value)}")
    if rule is Rule.BLOCK and strategy.name != "chain":
        raise ValueError(f"rule: block is not lossless for {strategy}; it {NEEDS_CHAIN}, or draft_strategy chain:K")
    if rule is Rule.MULTI_STEP and mode is not DraftMode.IID:
        raise ValueError(f"rule: multi_step is not lossless for {strategy}; it {RANDOM_ORDER}; use iid:B1,B2,...")
    if reason := _reason(construction, rule.value, mode is DraftMode.IID):
        raise ValueError(f"rule: {rule.value} {reason}")


def _reason(construction: str, algorithm: str, replacement: bool = False) -> str:
    """Why this verifier is not lossless for a construction; "" if it is."""
    row, column = _row(construction), _column(algorithm, replacement)
    if column in row.lossless:
        return ""
    reason = row.reason or (NOT_DRAWN if row == _CHOSEN else _BY_COLUMN[column])
    return f"is not lossless for {construction} ({row.what}); it {reason}"


def _row(construction: str) -> Construction:
    if construction not in TABLE:
        raise ValueError(f"construction: {construction!r}; choose from {', '.join(TABLE)}")
    return TABLE[construction]


def _column(algorithm: str, replacement: bool) -> Column:
    if algorithm not in {name for name, _ in COLUMNS}:
        names = ", ".join(dict.fromkeys(name for name, _ in COLUMNS))
        raise ValueError(f"algorithm: {algorithm!r}; choose from {names}")
    return algorithm, (replacement if algorithm in ("token", "traversal") else algorithm == "multi_step")
