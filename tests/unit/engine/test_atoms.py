"""What a drafter keeps of rows: the atoms of the processed laws, whatever the way, without a look at the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.waits import Waits

from benchmarks.rows import quantise_top
from rootward.core.requests import Sampling
from rootward.engine import atoms
from rootward.engine.atoms import Found, atoms_of, fetched, likely_tokens, reduced
from rootward.engine.sampling import distributions, top_atoms

WISHES = [
    Sampling(1.0),
    Sampling(0.6),
    Sampling(1.4, top_k=5),
    Sampling(0.8, top_p=0.9),
    Sampling(1.0, min_p=0.05),
    Sampling(0.7, top_k=20, top_p=0.8, min_p=0.01),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=1e-6),
]


def found(logits: torch.Tensor, wishes: list[Sampling], num_atoms: int, num_likely: int = 0) -> Found:
    kind, reduction = atoms_of(wishes, logits.shape[1], num_atoms, num_likely)
    return kind.read(*fetched([reduced(logits, reduction)]))


def expected(logits: torch.Tensor, wishes: list[Sampling], num_atoms: int) -> tuple[np.ndarray, np.ndarray]:
    return quantise_top(*top_atoms(distributions(logits, wishes), num_atoms))


@pytest.fixture(params=["here", "there"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`there`: as where values cannot be looked at."""
    if request.param == "there":
        monkeypatch.setattr(atoms, "host_can_read", lambda device: False)
    return request.param


@pytest.mark.parametrize(("vocab", "num_atoms"), [(7, 3), (7, 7), (7, 64), (300, 32), (5000, 64)])
def test_atoms_are_those_of_the_processed_laws(vocab: int, num_atoms: int, way: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(len(WISHES), vocab)) * 3.0)
    for wishes in (WISHES, WISHES[:2] * 4):
        ids, weight = expected(logits, wishes, num_atoms)
        got = found(logits, wishes, num_atoms)
        np.testing.assert_array_equal(got.weight, weight)
        np.testing.assert_array_equal(np.where(got.weight > 0, got.ids, -1), ids)


@pytest.mark.parametrize(("vocab", "num_atoms"), [(7, 3), (7, 7), (7, 64), (5000, 32), (5000, 64), (5000, 65)])
@pytest.mark.parametrize("are_integers", [False, True])  # many equal ones
def test_compiled_loop_of_float32_gives_what_tensors_give(
    vocab: int, num_atoms: int, are_integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(vocab)
    wishes = WISHES[:2] * 2
    logits = rng.normal(size=(len(wishes), vocab)) * 3.0
    rows = torch.from_numpy(np.round(logits) if are_integers else logits).float()
    rows[1, rng.permutation(vocab)[: vocab // 2]] = -torch.inf
    rows[2] = -torch.inf
    by_loop = found(rows, wishes, num_atoms)
    monkeypatch.setattr(atoms.Atoms, "_fits_kernel", lambda *_: False)
    by_tensors = found(rows, wishes, num_atoms)
    assert by_loop.weight[2].max() == 0
    np.testing.assert_allclose(by_loop.weight, by_tensors.weight, rtol=0, atol=1)  # exponentials differ in the last bit
    same = (by_loop.weight == by_tensors.weight).all(1)
    np.testing.assert_array_equal(
        np.where(by_loop.weight > 0, by_loop.ids, -1)[same], np.where(by_tensors.weight > 0, by_tensors.ids, -1)[same]
    )


def test_compiled_loop_takes_a_table_that_is_not_contiguous() -> None:
    kind, reduction = atoms_of(WISHES[:2], 40, 4)
    rows = torch.randn(2, 40)
    part = torch.from_numpy(np.column_stack([[0, 0], reduction.table]))[:, 1:]
    assert torch.equal(kind.reduce(rows, part), kind.reduce(rows, torch.from_numpy(reduction.table)))


def test_of_equally_likely_tokens_the_smaller_ids_are_kept(way: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(40):
        logits = torch.from_numpy(rng.integers(-2, 3, size=(len(WISHES), 40)).astype(np.float64))
        for num_atoms in (1, 4, 39):
            ids, weight = expected(logits, WISHES, num_atoms)
            got = found(logits, WISHES, num_atoms)
            np.testing.assert_array_equal(np.where(got.weight > 0, got.ids, -1), ids)
            np.testing.assert_array_equal(got.weight, weight)


def test_float32_rounds_by_one_unit_at_most(way: str) -> None:
    logits = torch.randn(len(WISHES), 2000, generator=torch.Generator().manual_seed(0)) * 3
    ids, weight = expected(logits, WISHES, 64)
    got = found(logits, WISHES, 64)
    assert np.mean(got.ids == np.where(ids < 0, got.ids, ids)) > 0.99
    assert np.abs(np.sort(got.weight) - np.sort(weight)).max() <= 1


@pytest.mark.parametrize("num_likely", [200, 500, 600])
@pytest.mark.parametrize("num_atoms", [0, 8])
def test_what_noise_chooses_among_comes_with_its_mass(num_atoms: int, num_likely: int, way: str) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 2
    got = found(logits, [Sampling(0.9)] * 3, num_atoms, num_likely)
    ids, probs = top_atoms(distributions(logits, [Sampling(0.9)] * 3), min(num_likely, 500))
    tokens, mass = likely_tokens(got.likely)
    order = np.argsort(-mass, axis=1, kind="stable")
    np.testing.assert_array_equal(np.take_along_axis(tokens, order, 1), ids)
    np.testing.assert_allclose(np.take_along_axis(mass, order, 1), probs / probs[:, :1], rtol=2e-6)
    np.testing.assert_array_equal(got.ids, found(logits, [Sampling(0.9)] * 3, 8).ids[:, :num_atoms])


def test_both_ways_agree_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    for logits in (
        torch.randn(8, 300, generator=generator),
        torch.randint(0, 4, (8, 300), generator=generator).float(),
        torch.full((8, 300), -torch.inf).index_fill_(1, torch.arange(5), 1.0),
    ):
        for wishes, num, likely in ((WISHES, 32, 0), (WISHES[:2] * 4, 64, 128)):
            kind, reduction = atoms_of(wishes, 300, num, likely)
            with monkeypatch.context() as patch:
                here = reduced(logits, reduction)
                patch.setattr(atoms, "host_can_read", lambda device: False)
                there = reduced(logits, reduction)
            assert torch.equal(here[:, :num], there[:, :num])
            assert torch.equal(here[:, num:].sort().values, there[:, num:].sort().values)  # ties in any order
            assert kind.read(there.numpy()).weight.max(1).tolist() == [65535] * 8


def test_a_broken_row_has_no_atoms_and_leaves_the_others_alone(way: str) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    whole = found(logits, [Sampling()] * 3, 8)
    logits[1] = torch.nan
    broken = found(logits, [Sampling()] * 3, 8)
    assert not broken.weight[1].any()
    for row in (0, 2):
        np.testing.assert_array_equal(broken.ids[row], whole.ids[row])
    assert not found(torch.full((1, 50), -torch.inf), [Sampling()], 8).weight.any()


def test_nothing_is_read_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atoms, "host_can_read", lambda device: False)
    kind, reduction = atoms_of(WISHES, 300, 32, 64)
    with Waits(monkeypatch) as waits:
        out = reduced(torch.randn(len(WISHES), 300), reduction)
        assert not waits.count
        (table,) = fetched([out])
    assert kind.read(table).likely.shape == (len(WISHES), 64)
    assert dict(waits.count) == {"cpu": 1}
    assert waits.values == len(WISHES) * (32 + 64)
    meta = reduction.of(torch.empty(8, 300, device="meta"), torch.empty(8, 4, dtype=torch.float64, device="meta"))
    assert meta.shape == (8, 96)


def test_kinds_are_few_and_greedy_rows_are_refused() -> None:
    assert {atoms_of([Sampling(t)], 9000, 64)[0] for t in (0.3, 1.0, 2.0)} == {atoms.Atoms(64, 0, 64, False)}
    assert {atoms_of([Sampling(1.0, k)], 9000, 64)[0].num_candidates for k in range(1, 10_000, 37)} == {
        64, 128, 256, 512, 1024, 2048, 4096
    }  # fmt: skip
    with pytest.raises(ValueError, match="greedy"):
        atoms_of([Sampling(0.0)], 9000, 64)
