"""Every row of a tree is processed under its own node's text, as plain decoding would at that text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.processed_law import PROCESSORS, STOP, processed_law
from support.random_trees import random_round

from rootward.core.requests import Sampling
from rootward.core.tree import TokenTree, root_only
from rootward.engine.processors import History, Prefix, adjusted, shifted
from rootward.engine.sampling import distributions

VOCAB = 7


def part(rng: np.random.Generator, sampling: Sampling, min_tokens: int):
    """A random text with a random tree below it."""
    prompt, output = rng.integers(VOCAB, size=rng.integers(1, 9)), rng.integers(VOCAB, size=rng.integers(0, 6))
    tree = random_round(rng, vocab=VOCAB, num_atoms=4, num_nodes=int(rng.integers(1, 9))).tree
    history = History(prompt.tolist(), output[:2].tolist())
    history.extend(output[2:].tolist())
    left = max(0, min_tokens - len(output))
    prefix = Prefix(history if sampling.penalised else None, left, (STOP,), output=output[-3:].tolist())
    return prompt.tolist(), output.tolist(), (sampling, prefix, tree)


def check(parts, logits: torch.Tensor, min_tokens: list[int]) -> float:
    """Largest error over all nodes of all trees."""
    trees = [tree for _, _, (_, _, tree) in parts]
    sampling = [s for _, _, (s, _, tree) in parts for _ in range(len(tree))]
    got = distributions(adjusted(logits, [p for _, _, p in parts]), sampling).numpy()
    error, row = 0.0, 0
    for (prompt, output, (s, _, _)), tree, least in zip(parts, trees, min_tokens, strict=True):
        for node in range(len(tree)):
            wanted = processed_law(logits[row].numpy(), prompt, [*output, *tree.path(node)], s, least)
            error = max(error, float(np.abs(got[row] - wanted).max()))
            row += 1
    return error


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_rows_of_a_mixed_batch_are_those_of_plain_decoding(temperature: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        chosen = [PROCESSORS[name] for name in rng.permutation(sorted(PROCESSORS))]
        if not temperature:
            chosen = [(cold(s), least) for s, least in chosen]
        parts = [part(rng, s, least) for s, least in chosen]
        logits = torch.from_numpy(rng.normal(size=(sum(len(p[2][2]) for p in parts), VOCAB)) * 2)
        before = logits.clone()
        assert check(parts, logits, [least for _, least in chosen]) < 1e-12
        assert torch.equal(logits, before)


def cold(s: Sampling) -> Sampling:
    return Sampling(
        0.0,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=s.logit_bias,
        allowed_token_ids=s.allowed_token_ids,
        bad_sequences=s.bad_sequences,
    )


def under_the_root(history: History, tree: TokenTree):
    """Wrong: every node under the text of the root."""
    ids, counts, present = below(history, tree)
    return ids, np.broadcast_to(counts[0], counts.shape).copy(), np.broadcast_to(present[0], present.shape).copy()


below = History.below


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_the_text_of_the_root_for_all_nodes_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "below", under_the_root)
    rng = np.random.default_rng(1)
    parts = [part(rng, *PROCESSORS[name]) for _ in range(12)]
    logits = torch.from_numpy(rng.normal(size=(sum(len(p[2][2]) for p in parts), VOCAB)))
    assert check(parts, logits, [0] * 12) > 1e-3


def test_nothing_is_copied_where_nothing_changes() -> None:
    logits = torch.randn(3, VOCAB)
    assert adjusted(logits, [(Sampling(0.5, 3, 0.9), Prefix(), root_only())] * 3) is logits


def test_half_precision_is_widened_before_it_is_changed() -> None:
    logits = torch.randn(1, VOCAB).bfloat16()
    part = (Sampling(logit_bias=((3, 0.001),)), Prefix(), root_only())
    assert adjusted(logits, [part])[0, 3] == logits[0, 3].float() + 0.001


def test_a_mask_that_leaves_only_impossible_tokens_leaves_a_law() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf, 1.0]])
    for temperature in (1.0, 1e-3):
        s = Sampling(temperature, allowed_token_ids=(1, 2))
        assert distributions(adjusted(logits, [(s, Prefix(), root_only())]), [s]).tolist() == [[0, 0.5, 0.5, 0]]
    one = Prefix(num_before_stop=1, stop_ids=(0, 3))
    assert distributions(adjusted(logits, [(Sampling(), one, root_only())]), [Sampling()]).tolist() == [
        [0, 0.5, 0.5, 0]
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_mask_gives_nothing_back_that_another_has_taken(temperature: float) -> None:
    """All tokens that are allowed are impossible: those that are not must not be as likely as they."""
    logits = torch.tensor([[2.0, -torch.inf, 3.0, -torch.inf, 1.0]]).repeat(2, 1)
    tree = TokenTree([0, 3], [-1, 0], [False, False])
    bad = Sampling(temperature, bad_sequences=((0,), (4,)))
    held_back = Prefix(num_before_stop=1, stop_ids=(2, 1))
    for sampling, prefix, expected in (
        (Sampling(temperature, allowed_token_ids=(1, 3)), held_back, ((3,), (1, 3))),
        (bad, held_back, ((3,), (2,))),
    ):
        rows = distributions(adjusted(logits, [(sampling, prefix, tree)]), [sampling] * 2)
        for row, tokens in zip(rows, expected, strict=True):
            assert set(row.nonzero().flatten().tolist()) == set(tokens if temperature else tokens[:1])


def test_a_draft_mirrors_what_does_not_depend_on_the_text() -> None:
    rng = np.random.default_rng(2)
    chosen = [s for name, (s, _) in PROCESSORS.items() if name in ("temperature", "min_p", "logit_bias", "allowed")]
    logits = torch.from_numpy(rng.normal(size=(2 * len(chosen), VOCAB)))
    got = distributions(shifted(logits, [*chosen, *chosen]), [*chosen, *chosen]).numpy()
    for row, s in zip(range(2 * len(chosen)), [*chosen, *chosen], strict=True):
        np.testing.assert_allclose(got[row], processed_law(logits[row].numpy(), (), (), s), atol=1e-12)


def test_history_has_room_for_any_text() -> None:
    one = History([])
    one.extend([*range(100), *range(50)])
    ids, counts, _ = one.below(root_only())
    assert (ids == np.arange(100)).all()
    assert (counts[0] == np.repeat([2, 1], 50)).all()


def test_history_grows() -> None:
    one = History(range(40), [3, 3])
    one.extend([50, 3])
    ids, counts, present = one.below(TokenTree([0, 3, 60, 60], [-1, 0, 1, 0], [False] * 4))
    by_token = dict(zip(ids.tolist(), counts.T.tolist(), strict=True))
    assert by_token[3] == [3, 4, 4, 3]
    assert by_token[50] == [1] * 4
    assert by_token[60] == [0, 0, 1, 1]
    assert by_token[0] == [0] * 4
    assert present[:, ids == 60].ravel().tolist() == [False, False, True, True]
    assert present[:, ids < 40].all()
