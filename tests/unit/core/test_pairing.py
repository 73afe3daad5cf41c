"""Every builder is in the table; what section 4 forbids is refused, with the reason."""

from __future__ import annotations

import pytest

from rootward.core import drafting, verification
from rootward.core.pairing import COLUMNS, TABLE, check_pair, check_rule, lossless_columns
from rootward.core.requests import DraftMode, Rule

NOT_BUILDERS = {"sequoia_shape"}  # makes a shape, not a tree
RATIO = [column for column in COLUMNS if column[0] != "match"]


def test_every_builder_declares_its_verifiers():
    assert set(drafting.__all__) - NOT_BUILDERS <= set(TABLE)
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
    "best_first_drawn": "yynnynn",
    "delayed": "yynnynn",
    "fixed_shape": "yynnynn",
    "greedy": "yynnynn",
    "chosen_last": "yynnynn",
    "top_k": "yynnyny",
    "eagle2": "yynnyny",
    "opt_tree": "yynnyny",
    "independent_marginals": "yynnyny",
    "n_gram": "yynnyny",
    "chosen_called_drawn": "ynnnnnn",
    "pruned": "ynnnnnn",
    "shuffled": "ynnnnnn",
    "iid_shuffled": "ynyynyn",
    "other_row_declared": "ynnnnnn",
    "coupled_children": "ynnnnnn",
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


def test_rules_of_requests():
    for rule in Rule:
        check_rule(DraftMode.SAMPLED, rule)
        check_rule(DraftMode.GREEDY, rule)
        check_rule(DraftMode.TOP_K, rule)
    check_rule(DraftMode.COUPLED, Rule.MATCH)
    with pytest.raises(ValueError, match="noise shared"):
        check_rule(DraftMode.COUPLED, Rule.TRAVERSAL)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"construction: 'tree'; choose from chain"):
        check_pair("tree", "token")
    with pytest.raises(ValueError, match=r"algorithm: 'ratio'; choose from match"):
        check_pair("chain", "ratio")
