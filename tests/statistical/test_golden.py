"""The library and the enumeration against the golden vectors: every file of single rounds, every entry."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from support import enumeration as enum
from support.models import golden_models, load
from support.optimum import optimum

from rootward.core import TokenTree, verification
from rootward.core.verification.step import step

MODELS = golden_models("tiny.json") + golden_models("random.json")
LAWS = load("laws.json")


def number(text):
    return float(Fraction(text))


def trees_of(model, entry):
    """The builder's trees, whether copies are kept."""
    kind, branching = entry["draft"], entry.get("branching")
    if kind in ("chain", "rsd_c"):
        return enum.drawn(model, enum.shape(model, branching))
    if kind == "iid":
        return enum.drawn(model, enum.shape(model, branching, replacement=True), replacement=True)
    if kind in ("greedy", "greedy_chosen_first"):
        return enum.greedy(model, branching, chosen_first=kind != "greedy")
    if kind == "top_k":
        return enum.top_k(model, branching)
    if kind == "rsd_s":
        return enum.stochastic_beam(model, entry["width"], entry["depth"])
    assert kind == "iid_paths"
    return enum.merged_paths(model, entry["paths"], entry["depth"])


@pytest.mark.parametrize(("model", "expected"), MODELS, ids=[model.name for model, _ in MODELS])
def test_expected_acceptance_length(model, expected):
    cache = {}
    for entry in expected:
        shape = (
            entry["draft"],
            str(entry.get("branching")),
            entry.get("width"),
            entry.get("paths"),
            entry.get("depth"),
        )
        if shape not in cache:
            cache[shape] = trees_of(model, entry)
        if entry["algorithm"] == "optimum":
            got = optimum(model, cache[shape])
        elif entry["algorithm"] == "match":
            got = enum.accepted(model, cache[shape], enum.matching)
        else:
            verifier = enum.by(entry["algorithm"], replacement=bool(entry.get("replacement")))
            got = enum.accepted(model, cache[shape], verifier)
        assert got == pytest.approx(entry["accepted_float"], abs=1e-9), entry


@pytest.mark.parametrize("case", LAWS["laws"], ids=lambda case: case["name"])
def test_law_of_one_tree(case):
    tree = TokenTree(case["token"], case["parent"], case["sampled"])
    target, draft = ([[number(x) for x in row] for row in case[name]] for name in ("target", "draft"))
    for algorithm, want in case["expected"].items():
        law = verification.law(algorithm, tree, target, draft, replacement=case["replacement"])
        np.testing.assert_allclose(law.stop, [number(x) for x in want["stop"]], rtol=0, atol=1e-9)
        assert law.block_efficiency == pytest.approx(number(want["block_efficiency"]), abs=1e-9)
        assert np.isfinite(law.residual).all()
        for row, residual in zip(law.residual, want["residual"], strict=True):
            if residual is not None:
                np.testing.assert_allclose(row, [number(x) for x in residual], rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", LAWS["steps"], ids=lambda case: f"w={case['w']} x={case['x']}")
def test_step(case):
    p, q = (np.array([number(x) for x in case[name]]) for name in "PQ")
    accept, budget, law = step(number(case["w"]), p, q, case["x"])
    assert accept == pytest.approx(number(case["a"]), abs=1e-12)
    assert budget == pytest.approx(number(case["w_next"]), abs=1e-12)
    if case["P_next"] is not None:
        np.testing.assert_allclose(law, [number(x) for x in case["P_next"]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", LAWS["matches"], ids=str)
def test_match(case):
    tree = TokenTree(case["token"], case["parent"], [False] * len(case["token"]))
    assert verification.match(tree, case["choice"]) == (case["stop"], case["bonus"])
