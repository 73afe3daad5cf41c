"""A level of growth as one recording: the same trees to the last weight, one copy to the host, refused where nothing can be recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.waits import Waits
from unit.drafter.test_grower import opening
from unit.engine.networks import VOCAB
from unit.engine.test_graphs import Replays, model_of

from drafter_service.__main__ import build_lookup, load, recipe_of
from drafter_service.settings import DrafterSettings
from rootward.core.frames import Commit, Grow, Launch, Open, extend_hash
from rootward.core.growth import AheadBudget, BestFirst
from rootward.core.requests import DraftMode, Sampling
from rootward.core.rng import Key
from rootward.engine import atoms, grower
from rootward.engine.atoms import Atoms
from rootward.engine.grower import Grower
from rootward.engine.model import HuggingFaceModel
from rootward.errors import ConfigurationError

MIXED = (
    {},
    {"law": DraftMode.COUPLED, "num_atoms": 3},
    {"sampling": Sampling(0.0), "law": DraftMode.TOP_K},
    {"sampling": Sampling(0.8, top_k=9, top_p=0.9), "law": DraftMode.GREEDY, "node_cap": 6},
    {"ahead_cap": 60, "node_cap": 4},
)
OF_A_KIND = {
    "declared": (MIXED[0], MIXED[2], MIXED[0]),
    "matched": MIXED[1:2] * 3,
    "cut": MIXED[3:4] * 2,
    "guesses": MIXED[4:] * 2,
}


def openings(kinds: tuple[dict[str, Any], ...]) -> list[Open]:
    return [opening(key, prefix=(3, 4, 5 + key), **kind) for key, kind in enumerate(kinds)]


def growth(model: HuggingFaceModel, opens: list[Open], rounds: int = 5) -> tuple[list[tuple[int, Grow]], int]:
    """The frames of these sessions through some rounds that commit two or three tokens; and how many levels there were."""
    shape = BestFirst(draws_per_level=2, root_family=(0.33, 0.27))
    drafter: Grower[int] = Grower(model, incarnation=9, best_first=shape, ahead_budget=AheadBudget(share=4))
    drafter.idle_time.idle_s = 1e9  # it grows ahead
    frames, levels = [], 0
    for one in opens:
        assert drafter.open(one.slot, one) is None
    for number in range(rounds):
        for one in opens:
            length = drafter.trees[one.slot].tree.length
            drafter.launch(one.slot, Launch(one.slot, length, Key(77).bonus(length)))
        while not drafter.idle:
            frames += drafter.level()
            levels += 1
        for one in opens:
            tree = drafter.trees[one.slot].tree
            tokens = [next(iter(tree.nodes.values())).token, 7, 8][: 2 + number % 2]
            hash_ = tree.hash
            for token in tokens:
                hash_ = extend_hash(hash_, token)
            drafter.commit(one.slot, Commit(one.slot, tree.length, tuple(tokens), hash_))
    for one in opens:
        drafter.close(one.slot)
    model.check_idle()
    return frames, levels


def tables(model: HuggingFaceModel) -> HuggingFaceModel:
    """Logits that depend on a row's token alone, so that padding changes no bit of them; half of them are ties."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    table[:, ::2] = table[:, ::2].round()

    def look_up(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        rows, keep = table[kwargs["input_ids"]], kwargs.get("logits_to_keep")
        if keep is not None:
            rows = rows[:, keep]
        out.logits = rows
        return out

    model.network.register_forward_hook(look_up, with_kwargs=True)
    return model


def same(ours: list[tuple[int, Grow]], theirs: list[tuple[int, Grow]]) -> bool:
    """But for how long they took."""
    plain = [[(key, replace(grow, draft_us=0)) for key, grow in frames] for frames in (ours, theirs)]
    return plain[0] == plain[1]


@pytest.mark.parametrize("kind", ["mixed", *OF_A_KIND])
def test_recorded_levels_grow_the_same_trees_to_the_last_weight(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the operators of a device, on which nothing can be looked at. Levels of nodes of one kind are recorded to the atoms."""
    monkeypatch.setattr(grower, "MOST_AHEAD", len(MIXED))  # guesses beside all other kinds of nodes
    opens = openings(OF_A_KIND.get(kind, MIXED))
    plain, _ = growth(tables(model_of("llama", None)), opens)
    monkeypatch.setattr(atoms, "host_can_read", lambda device: False)
    recorded = tables(model_of("llama", Replays()))
    frames, levels = growth(recorded, opens)
    assert same(frames, plain)
    assert any(frame.guesses.any() for _, frame in frames) == (kind in ("mixed", "guesses"))
    graphs = recorded._pass.graphs
    assert graphs.num_replayed + graphs.num_other <= levels
    assert graphs.num_replayed > levels / 3
    assert kind == "mixed" or any(isinstance(bucket.kind, Atoms) for bucket in graphs._recorded)


def test_a_wrong_recording_is_seen() -> None:
    """Control: tables of the reduction that stay what they were when it was recorded."""
    opens = openings(({}, *OF_A_KIND["cut"]))
    plain, _ = growth(tables(model_of("llama", None)), opens)
    recorded = tables(model_of("llama", Replays()))
    graphs = recorded._pass.graphs
    recording = graphs._recording

    def stale(static: Any, bucket: Any, reduction: Any) -> Any:
        found = recording(static, bucket, reduction)
        if found.numbers is None:
            return found
        kept = found.numbers.clone()
        return replace(found, replay=lambda: [found.numbers[:, 1:].copy_(kept[:, 1:]), found.replay()][1])

    graphs._recording = stale
    assert not same(growth(recorded, opens)[0], plain)


def test_recorded_levels_of_a_network_grow_the_same_trees() -> None:
    """Padding rounds otherwise, by less than what would change a draw here."""
    opens = openings(MIXED[:1] * 4)
    recorded = model_of("llama", Replays())
    ours, theirs = growth(recorded, opens)[0], growth(model_of("llama", None), opens)[0]
    assert recorded._pass.graphs.num_replayed > 8
    for (key, a), (other, b) in zip(ours, theirs, strict=True):
        assert key == other
        np.testing.assert_array_equal(a.token, b.token)
        np.testing.assert_array_equal(a.parent, b.parent)


@pytest.mark.parametrize("replays", [True, False], ids=["recorded", "launched"])
@pytest.mark.parametrize("num", [1, 5])
def test_a_level_is_one_copy_to_the_host(replays: bool, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of trees; and nothing else of it is looked at."""
    monkeypatch.setattr(atoms, "host_can_read", lambda device: False)
    model = model_of("llama", Replays() if replays else None)
    edited = {"sampling": Sampling(0.9, logit_bias=((4, 1.0),), repetition_penalty=1.2)}
    opens = openings((*MIXED[3:], edited, *MIXED)[:num])
    with Waits(monkeypatch) as waits:
        _, levels = growth(model, opens)
    assert levels > 10
    assert set(waits.count) == {"cpu"}
    assert levels - 5 <= waits.count["cpu"] <= levels  # a level may do nothing but say that a tree rests


async def test_what_runs_on_no_cuda_device_cannot_record() -> None:
    drafters = [
        ({"model": "draft", "device": "cpu"}, "device 'cpu' has none"),
        ({"model": "tabular:vocab=5,seed=1"}, "runs on no device"),
    ]
    for given, why in drafters:
        with pytest.raises(ConfigurationError, match=f"cuda_graphs: .*{why}"):
            await load(DrafterSettings(**given, cuda_graphs=True))
    recipe = recipe_of("ngram:")
    assert recipe is not None
    with pytest.raises(ConfigurationError, match="cuda_graphs: a drafter without a model"):
        build_lookup(recipe, DrafterSettings(model="ngram:", cuda_graphs=True))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="finds no CUDA device"):
            await load(DrafterSettings(model="draft", device="cuda", cuda_graphs=True))
