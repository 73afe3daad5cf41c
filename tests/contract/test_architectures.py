"""What the engine promises of every architecture: batched trees give the logits of a cache-free forward over each path.

Three sessions of different lengths and trees share each forward, in arbitrary order; paths are committed, nodes kept below a
commit, plain tokens decoded after it. Two negative controls per family show that the comparison would see a wrong mask or a
wrong position. `versions.sh` runs this folder against several releases of transformers; REPORT=file adds a table of the errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from contract.families import REFUSED, SUPPORTED, VOCAB, WINDOW, Family
from contract.sessions import Session, error

from rootward.engine import tree_attention
from rootward.engine.layers import KINDS
from rootward.engine.model import HuggingFaceModel
from rootward.ports import COMMITTED, Rows

TOLERANCE = 1e-5  # of the largest logit; rounding is 1e-6 at most
POWER = 1e-4  # what a planted error must at least show
PREFIXES = (8, 3, 11)
TREES = ([COMMITTED, 0, 0, 1, 1, 2, 4], [COMMITTED], [COMMITTED, 0, 1, 1, 0])
BRANCHED = [COMMITTED, 0, 0, 1, 1, 2]
LINE = "| {} | {} | {} | {} | {} | {} |\n"
HEAD = LINE.format("family", "attention", "trees", "after commits", "control: chain mask", "control: positions + 1")


def tokens(num: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(2, VOCAB, num).tolist()
    return drawn


def truth_of(family: Family) -> Any:
    """The same weights under the network's own eager attention, which shares nothing with ours."""
    network = network_of(family)
    network.set_attn_implementation("eager")
    return network


def network_of(family: Family) -> Any:
    if not family.exists:
        pytest.skip(f"transformers {transformers.__version__} has no {family.config}")
    return family.network()


def load(network: Any, fast: bool = True) -> HuggingFaceModel:
    return HuggingFaceModel(network, name="tiny", max_slots=4, fast=fast)


def prefilled(model: HuggingFaceModel, network: Any) -> tuple[list[Session], float]:
    """Three sessions whose prefixes went through one forward, and the error of its last rows."""
    sessions = [Session(model, model.open()) for _ in PREFIXES]
    chains = [s.chain(tokens(n, i)) for i, (s, n) in enumerate(zip(sessions, PREFIXES, strict=True))]
    logits = model.forward(chains, num_logits=[1] * len(chains))
    wrong = error(logits, [s.truth(network, c)[-1:] for s, c in zip(sessions, chains, strict=True)])
    for session, rows in zip(sessions, chains, strict=True):
        session.commit(int(rows.node[-1]))
    return sessions, wrong


def step(model: HuggingFaceModel, network: Any, grown: list[tuple[Session, Rows]]) -> float:
    """Error of one forward."""
    logits = model.forward([rows for _, rows in grown])
    return error(logits, [session.truth(network, rows) for session, rows in grown])


def trees_and_commits(model: HuggingFaceModel, network: Any) -> tuple[float, float]:
    """The errors of a batch of trees, and of everything that follows from committing parts of them."""
    (a, b, c), at_prefill = prefilled(model, network)
    grown = [(s, s.grow(TREES[i], tokens(len(TREES[i]), 10 + i))) for i, s in ((2, c), (0, a), (1, b))]
    first = max(at_prefill, step(model, network, grown))
    a.commit(1, keep_below=True)  # 3, 4 and below it 6 stay
    b.commit(0)
    c.commit(3)
    grown = [
        (b, b.grow([COMMITTED, 0, 0], tokens(3, 20))),
        (a, a.grow([4, COMMITTED, 6, 7], tokens(4, 21), first=7)),
        (c, c.grow([COMMITTED], tokens(1, 22))),
    ]
    after = step(model, network, grown)
    a.commit(9)  # through a kept node
    b.commit(2)
    c.release()
    after = max(
        after, step(model, network, [(s, s.grow([COMMITTED], tokens(1, 30 + i))) for i, s in enumerate((a, b, c))])
    )
    for session in (a, b, c):
        session.commit(0)
        assert model.length(session.slot) == len(session.tokens)
        model.close(session.slot)
    model.check_idle()
    return first, after


def chain_mask(model: HuggingFaceModel, network: Any) -> float:
    """Control: the nodes of a tree are forwarded as if each hung below the one before."""
    session = prefilled(model, network)[0][0]
    drawn = tokens(len(BRANCHED), 40)
    right = session.truth(network, session.grow(BRANCHED, drawn))
    as_chain = Rows(session.slot, np.arange(len(drawn)), np.arange(len(drawn)) - 1, np.array(drawn))
    return error(model.forward([as_chain])[2:], [right[2:]])  # the first two nodes are a chain in the tree too


def positions_off(model: HuggingFaceModel, network: Any) -> float:
    """Control: the truth is told positions one too far below the committed end."""
    session = prefilled(model, network)[0][0]
    rows = session.grow(BRANCHED, tokens(len(BRANCHED), 41))
    return error(model.forward([rows]), [session.truth(network, rows, gap=1)])


@pytest.fixture(scope="module")
def report() -> Iterator[Callable[..., None]]:
    """Collects a line per family."""
    lines: list[str] = []

    def add(name: str, attention: str, *errors: float) -> None:
        lines.append(LINE.format(name, attention, *(f"{e:.1e}" for e in errors)))

    yield add
    if "REPORT" in os.environ:
        Path(os.environ["REPORT"]).write_text(HEAD + "|---|---|---|---|---|---|\n" + "".join(lines), encoding="utf-8")


@pytest.mark.parametrize(("name", "fast"), [*((n, False) for n in SUPPORTED), *((n, True) for n in sorted(KINDS))])
def test_trees_equal_paths(name: str, fast: bool, report: Callable[..., None]) -> None:
    network, truth = network_of(SUPPORTED[name]), truth_of(SUPPORTED[name])
    model = load(network, fast)
    assert model.info.supports_trees, model.probe_report.reason
    assert (model.llama is not None) == (fast and name in KINDS)
    first, after = trees_and_commits(model, truth)
    chain, positions = chain_mask(load(network, fast), truth), positions_off(load(network, fast), truth)
    report(f"{name} (fast)" if fast else name, model.probe_report.attention, first, after, chain, positions)
    assert max(first, after) <= TOLERANCE
    assert min(chain, positions) >= POWER


OPTIONS = [(name, {"sliding_window": WINDOW + 1}) for name, f in SUPPORTED.items() if "sliding_window" in f.changes]
OPTIONS += [("gemma2", {"attn_logit_softcapping": 2.2}), ("smollm3", {"no_rope_layers": [1, 1]})]


CASES = [(name, off, fast) for name, off in OPTIONS for fast in (False, True) if not fast or name in KINDS]


@pytest.mark.parametrize(
    ("name", "off", "fast"), CASES, ids=[f"{name}{' (fast)' * fast} {next(iter(off))}" for name, off, fast in CASES]
)
def test_options_of_attention_show(name: str, off: dict[str, Any], fast: bool) -> None:
    """Control: the truth of the same weights under another window, cap or encoding is not what the engine computes."""
    family = SUPPORTED[name]
    network, other = network_of(family), truth_of(replace(family, changes=family.changes | off))
    model = load(network, fast)
    session = prefilled(model, network)[0][2]
    rows = session.grow(BRANCHED, tokens(len(BRANCHED), 42))
    assert error(model.forward([rows]), [session.truth(other, rows)]) >= POWER


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_branch_is_refused_and_decodes_plainly(name: str) -> None:
    network = network_of(REFUSED[name])
    model = load(network)
    assert not model.info.supports_trees
    assert model.probe_report.reason
    sessions, wrong = prefilled(model, network)
    for round_ in range(3):
        grown = [(s, s.grow([COMMITTED], tokens(1, 50 + 3 * round_ + i))) for i, s in enumerate(sessions)]
        wrong = max(wrong, step(model, network, grown))
        for session in sessions:
            session.commit(0)
    assert wrong <= TOLERANCE


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_caps_and_sinks_take_our_attention(name: str) -> None:
    network = network_of(SUPPORTED[name])
    ours = tree_attention.NAME if type(network)._supports_sdpa else tree_attention.OTHER_NAME
    assert load(network).probe_report.attention == ours


def test_sinks_show() -> None:
    """Control: the truth of the same weights with other sinks is not what the engine computes."""
    network, other = network_of(SUPPORTED["gpt_oss"]), truth_of(SUPPORTED["gpt_oss"])
    for parameter, weight in other.named_parameters():
        if parameter.endswith("sinks"):
            weight.data += 0.1
    session = prefilled(load(network), network)[0][2]
    rows = session.grow(BRANCHED, tokens(len(BRANCHED), 43))
    assert error(session.model.forward([rows]), [session.truth(other, rows)]) >= POWER


def test_there_are_enough_families() -> None:
    """A release that drops or renames families must not make this suite empty."""
    assert sum(family.exists for family in SUPPORTED.values()) >= 20
    assert sum(family.exists for family in REFUSED.values()) >= 5


def test_the_comparison_sees_nan_and_single_rows() -> None:
    right = torch.ones(2, 3)
    assert error(right * torch.nan, [right]) == float("inf")
    off = right.clone()
    off[1, 2] += 1e-3
    assert error(off, [right[:1], right[1:]]) == pytest.approx(1e-3, rel=1e-3)
