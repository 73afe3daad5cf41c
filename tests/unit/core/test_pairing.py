"""Every builder is in the table; what section 4 forbids is refused, with the reason."""

from __future__ import annotations

import pytest

from rootward.core import drafting, verification
from rootward.core.pairing import COLUMNS, TABLE, check_pair, check_rule, lossless_columns
from rootward.core.requests import DraftMode, DraftStrategy, Rule

RATIO = [column for column in COLUMNS if column[0] != "match"]


def test_every_builder_declares_its_verifiers():
    assert set(drafting.__all__) <= set(TABLE)
    assert all(builder in drafting.__doc__ for builder in drafting.__all__)


def test_every_law_of_a_request_does():
    assert {law.value for law in DraftMode} <= set(TABLE)


def test_every_algorithm_of_the_library_is_a_column():
    assert {name for name, _ in COLUMNS} == {"match", *verification.ALGORITHMS}


@pytest.mark.parametrize("construction", TABLE)
def test_match_may_verify_everything(construction):
    check_pair(construction, "match")
    check_pair(construction, "match", replacement=True)


@pytest.mark.parametrize("construction", TABLE)
def test_what_is_not_lossless_is_refused(construction):
    for algorithm, replacement in COLUMNS:
        if (algorithm, replacement) in lossless_columns(construction):
            check_pair(construction, algorithm, replacement)
        else:
            with pytest.raises(ValueError, match=rf"{algorithm}.*not lossless for {construction} \(.+\); it \w+ .+"):
                check_pair(construction, algorithm, replacement)


# section 4, row by row: (match, token, token of copies, multi_step, traversal, traversal of copies, block)
SECTION_4 = {
    "chain": "yyyyyyy",
    "iid": "ynyynyn",
    "iid_by_value": "ynynnyn",
    "iid_paths": "yynnynn",
    "rsd_c": "yynnynn",
    "rsd_s": "yynnynn",
    "best_first": "yynnynn",
    "greedy": "yynnynn",
    "chosen_last": "yynnynn",
    "top_k": "yynnyny",
    "marginals": "yynnyny",
    "n_gram": "yynnyny",
    "chosen_called_drawn": "ynnnnnn",
    "pruned": "ynnnnnn",
    "shuffled": "ynnnnnn",
    "iid_shuffled": "ynyynyn",
    "other_row_declared": "ynnnnnn",
    "coupled": "ynnnnnn",
}


@pytest.mark.parametrize("construction", SECTION_4)
def test_the_table_is_that_of_the_design(construction):
    allowed = "".join("y" if column in lossless_columns(construction) else "n" for column in COLUMNS)
    assert allowed == SECTION_4[construction]


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (("rsd_c", "token", True), "drawn without replacement; use replacement=False"),
        (("iid", "traversal", False), "independent copies; use replacement=True"),
        (("rsd_s", "multi_step", True), "random order"),
        (("iid_by_value", "multi_step", True), "number was fixed beforehand"),
        (("rsd_c", "block", False), "chain"),
        (("pruned", "traversal", False), "look at what they drop"),
        (("chosen_called_drawn", "token", False), "another one was declared"),
        (("coupled", "traversal", False), "noise shared with the target"),
        (("top_k", "token", True), "one-hot"),
    ],
)
def test_reasons(pair, reason):
    with pytest.raises(ValueError, match=reason):
        check_pair(*pair)


SERVED = {  # strategy, mode: rules of requests
    ("best_first", DraftMode.SAMPLED): {Rule.TRAVERSAL, Rule.TOKEN},
    ("best_first", DraftMode.GREEDY): {Rule.TRAVERSAL, Rule.TOKEN},
    ("best_first", DraftMode.TOP_K): {Rule.TRAVERSAL, Rule.TOKEN},
    ("best_first", DraftMode.COUPLED): set(),
    ("chain:3", DraftMode.SAMPLED): {Rule.TRAVERSAL, Rule.TOKEN, Rule.BLOCK},
    ("rsd_c:2,2", DraftMode.SAMPLED): {Rule.TRAVERSAL, Rule.TOKEN},
    ("rsd_s:2,2", DraftMode.SAMPLED): {Rule.TRAVERSAL, Rule.TOKEN},
    ("greedy", DraftMode.GREEDY): {Rule.TRAVERSAL, Rule.TOKEN},
    ("iid:2,2", DraftMode.IID): {Rule.MULTI_STEP, Rule.TOKEN, Rule.TRAVERSAL},
    ("top_k", DraftMode.TOP_K): {Rule.TRAVERSAL, Rule.TOKEN},
    ("marginals", DraftMode.TOP_K): {Rule.TRAVERSAL, Rule.TOKEN},
    ("coupled", DraftMode.COUPLED): set(),
}


@pytest.mark.parametrize(("strategy", "mode"), SERVED)
def test_each_strategy_has_its_rules_and_the_others_are_refused(strategy: str, mode: DraftMode) -> None:
    asked = DraftStrategy.parse(strategy)
    for rule in Rule:
        if rule is Rule.MATCH or rule in SERVED[strategy, mode]:
            check_rule(asked, mode, rule)
        else:
            with pytest.raises(ValueError, match=rf"{rule.value}.*(; use|only match|one-hot)"):
                check_rule(asked, mode, rule)


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule is not Rule.MATCH])
def test_no_ratio_test_is_suggested_for_coupled_trees(rule: Rule) -> None:
    with pytest.raises(ValueError, match=r"so only match may verify them$"):
        check_rule(DraftStrategy.parse("coupled:2,2"), DraftMode.COUPLED, rule)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tree", "draft_strategy: 'tree' is unknown; use one of best_first, chain:K"),
        ("chain", "write chain:K"),
        ("chain:1,2", "write chain:K"),
        ("chain:0", r"outside \[1, 64\]"),
        ("iid:9", r"outside \[1, 8\]"),
        ("rsd_c:", "write NAME or NAME:N1,N2"),
        ("rsd_c:two", "write NAME or NAME:N1,N2"),
        ("rsd_s:4", "write rsd_s:WIDTH,DEPTH"),
        ("best_first:3", "write best_first"),
    ],
)
def test_a_strategy_that_is_none_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DraftStrategy.parse(text)


def test_a_strategy_makes_trees_of_its_own_mode_and_of_matched_ones() -> None:
    for text in ("chain:3", "rsd_c:2", "greedy", "iid:2", "top_k", "best_first"):
        asked = DraftStrategy.parse(text)
        assert str(asked) == text
        asked.check_mode(DraftMode.TOP_K)
        asked.check_mode(asked.mode or DraftMode.GREEDY)
    with pytest.raises(ValueError, match="rsd_c:2' grows sampled trees, not greedy ones"):
        DraftStrategy.parse("rsd_c:2").check_mode(DraftMode.GREEDY)
    with pytest.raises(ValueError, match="grows no copies"):
        DraftStrategy().check_mode(DraftMode.IID)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"construction: 'tree'; choose from chain"):
        check_pair("tree", "token")
    with pytest.raises(ValueError, match=r"algorithm: 'ratio'; choose from match"):
        check_pair("chain", "ratio")
