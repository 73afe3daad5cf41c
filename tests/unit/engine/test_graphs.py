"""Recorded steps, without a GPU: the same buffers in every replay, the same logits as unrecorded, and nothing that reads the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.waits import Waits
from unit.engine.networks import FAMILIES, VOCAB, tiny

from rootward.engine import graphs, tree_attention
from rootward.engine.attention import layer_windows
from rootward.engine.graphs import Run, StaticStep, bucket_of
from rootward.engine.kv_cache import running
from rootward.engine.model import HuggingFaceModel
from rootward.engine.paged import Extents
from rootward.engine.passes import TreePass
from rootward.engine.slots import Size, Slots
from rootward.ports import COMMITTED, Rows

META = torch.device("meta")


@dataclass
class Replays:
    """Stands for CUDA graphs: what is recorded is run again, its result lies in the same tensor, its buffers must be the same."""

    buffers: list[set[tuple[int, ...]]] = field(default_factory=list)
    seen: set[tuple[int, ...]] | None = None  # of the bucket that is being replayed

    def __call__(self, run: Run) -> Run:
        out, seen = run(), set()
        self.buffers.append(seen)

        def replay() -> torch.Tensor:
            self.seen = seen
            out.copy_(run())
            self.seen = None
            return out

        return replay


def watched(network: Any, replays: Replays) -> None:
    """Note where the inputs of every recorded forward lie."""

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        now = running.get()
        if now is not None and isinstance(now.step, StaticStep) and replays.seen is not None:
            c = now.step.paged
            parts = (now.step.write, c.block_table, c.length, c.scratch, c.scratch_position, c.sees, c.position)
            places = (kwargs["input_ids"], kwargs["position_ids"], *parts)
            replays.seen.add(tuple(tensor.data_ptr() for tensor in places))

    network.register_forward_pre_hook(note, with_kwargs=True)


def model_of(family: str, replays: Replays | None) -> HuggingFaceModel:
    config, changes = FAMILIES[family]
    network = tiny(config, **changes)
    model = HuggingFaceModel(network, name="tiny", max_slots=6, max_len=128, attn="eager", capture=replays)
    if replays is not None:
        watched(network, replays)
    return model


def tree(slot: int, num: int, rng: np.random.Generator) -> Rows:
    parent = np.array([COMMITTED, *(int(rng.integers(0, i)) for i in range(1, num))])
    return Rows(slot, np.arange(num), parent, rng.integers(2, VOCAB, num))


def session(model: HuggingFaceModel) -> list[torch.Tensor]:
    """Steps that grow and shrink, commit, keep nodes, close slots and take them again."""
    rng, found, open_ = np.random.default_rng(0), [], []
    for step in range(28):
        if len(open_) < 5 and step % 2 == 0:
            open_.append(slot := model.open())
            found.append(
                model.forward([Rows.chain(slot, 0, rng.integers(2, VOCAB, 3 + step).tolist())], num_logits=[1])
            )
            model.commit(slot, 2 + step, keep_below=False)
        batch = [tree(slot, int(rng.integers(1, 9)), rng) for slot in open_[: 1 + step % len(open_)]]
        found.append(model.forward(batch))
        for rows in batch:
            model.commit(rows.slot, int(rng.integers(0, len(rows.node))), keep_below=False)
        if step % 7 == 6:
            model.close(open_.pop(0))
    for slot in open_:
        model.close(slot)
    model.check_idle()
    return found


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_recorded_steps_give_the_same(family: str) -> None:
    replays = Replays()
    recorded = model_of(family, replays)
    graphs = recorded._pass.graphs
    for ours, theirs in zip(session(recorded), session(model_of(family, None)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    assert graphs.num_replayed >= 8
    assert graphs.num_other > len(graphs)  # every bucket's first time, and the long prompts
    assert len(graphs) == len(replays.buffers) >= 3
    used = [seen for seen in replays.buffers if seen]
    assert used
    assert all(len(seen) == 1 for seen in used)  # one set of buffers a bucket, whatever was in them


@pytest.mark.parametrize("recorded", [True, False])
def test_wanted_rows_are_taken_without_a_wait(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of them would have a device asked how many rows it keeps."""
    expected = session(model_of("llama", None))
    model = model_of("llama", Replays() if recorded else None)
    with Waits(monkeypatch) as waits:
        found = session(model)
    assert not waits.count
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


def test_results_outlive_the_next_replay() -> None:
    model = model_of("llama", Replays())
    slot, rng = model.open(), np.random.default_rng(1)
    found = []
    for _ in range(4):
        found.append(model.forward([tree(slot, 4, rng)]))
        model.release(slot)
    assert model._pass.graphs.num_replayed == 3
    assert not torch.equal(found[2], found[3])


def test_a_recording_that_nobody_needs_any_more_makes_room_and_one_in_use_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(graphs, "IDLE_STEPS", 5)
    monkeypatch.setattr(graphs, "STEPS_BETWEEN", 1)
    replays = Replays()
    model, rng = model_of("llama", replays), np.random.default_rng(2)
    slot, recorded = model.open(), model._pass.graphs

    def replayed(rows: int, times: int) -> list[bool]:
        """Whether each of so many steps was a replay."""
        found = []
        for _ in range(times):
            before = recorded.num_replayed
            model.forward([tree(slot, rows, rng)])
            model.release(slot)
            found.append(recorded.num_replayed > before)
        return found

    assert replayed(1, 2) == replayed(2, 2) == [False, True]
    assert replayed(1, 2) == [True, True]  # used before the other, and after it
    assert replayed(4, 2) == [False, False]  # the places of both were needed a moment ago
    assert replayed(1, 2) == [True, True]
    assert replayed(4, 2) == [True, True]  # for the second one, idle for longest though made last
    assert replayed(1, 6) == [True] * 6
    assert replayed(2, 2) == [False, True]  # forgotten: its first time again
    assert replayed(8, 6)[-1]  # steps count that are no replays
    assert len(recorded) == 2
    assert len(replays.buffers) == 5


def test_recordings_change_places_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    monkeypatch.setattr(graphs, "IDLE_STEPS", 1)
    monkeypatch.setattr(graphs, "STEPS_BETWEEN", 10)
    replays = Replays()
    model, rng = model_of("llama", replays), np.random.default_rng(2)
    slot = model.open()
    for rows in [1, 1, 2, 4] * 20:
        model.forward([tree(slot, rows, rng)])
        model.release(slot)
    assert 4 <= len(replays.buffers) <= 9


@pytest.mark.parametrize("end_fails", [False, True])
def test_where_memory_does_not_suffice_only_this_bucket_is_refused(
    end_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = Replays()
    model, rng = model_of("llama", replays), np.random.default_rng(2)
    slot, recorded = model.open(), model._pass.graphs
    asked = 0

    def full(run: Run) -> Run:
        nonlocal asked
        asked += 1
        try:
            raise torch.OutOfMemoryError("no room")
        finally:
            if end_fails:  # as the end of torch's recording does
                raise RuntimeError("the recording is invalid")

    for capture, rows in ((full, 1), (replays, 2), (replays, 1)):
        monkeypatch.setattr(recorded, "_capture", capture)
        for _ in range(3):
            model.forward([tree(slot, rows, rng)])
            model.release(slot)
    assert asked == len(recorded) == len(replays.buffers) == 1


def test_buckets_are_powers_of_two() -> None:
    slots = Slots(Size.of(4, 4096, 64, 16, None), VOCAB, "")
    rng = np.random.default_rng(0)
    batch = [tree(slots.open(), num, rng) for num in (3, 5, 1)]
    with slots.placed(batch) as entries:
        assert bucket_of(entries) == Extents(4, 8, 16, 32)
        assert bucket_of(entries[2:]) == Extents(1, 1, 16, 32)


def test_what_cannot_be_recorded_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    def broken(run: Run) -> Run:
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("the recording is invalid")

    model = model_of("llama", None)
    plain = session(model_of("llama", None))
    model._pass.graphs = TreePass(model.network, model.size, layer_windows(model.network.config), capture=broken).graphs
    for ours, theirs in zip(session(model), plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(model._pass.graphs) == 0
    assert "operation not permitted" in caplog.text


# -- nothing in a step reads the device: it runs on tensors that have no data -------------------------------------------


def meta_pass(family: str, attention: str) -> TreePass:
    config, changes = FAMILIES[family]
    network = tiny(config, **changes).to(META)
    network.set_attn_implementation(attention)
    windows = layer_windows(network.config.get_text_config())
    return TreePass(network, Size.of(4, 128, 64, 16, None), windows)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", tree_attention.NAME])
def test_a_step_reads_nothing(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[2])

    monkeypatch.setattr(tree_attention, "is_available", lambda device: True)
    monkeypatch.setattr(tree_attention, "tree_attention", kernel)
    own = meta_pass(family, attention)
    static = StaticStep(Extents(4, 8, 4, 8), own.size, META)
    assert own._forward(static).shape == (4, 8, VOCAB)


def test_a_step_that_reads_is_seen() -> None:
    """Control: a value that is asked for, and a shape that depends on values."""
    own = meta_pass("llama", "eager")
    static = StaticStep(Extents(1, 2, 1, 2), own.size, META)
    for read in (lambda ids: int(ids.max()), lambda ids: ids[ids > 3]):
        handle = own.network.register_forward_pre_hook(
            lambda module, args, kwargs, read=read: read(kwargs["input_ids"]), with_kwargs=True
        )
        with pytest.raises((RuntimeError, NotImplementedError)):
            own._forward(static)
        handle.remove()


def test_steps_are_recorded_again_once_no_hidden_states_are_wanted() -> None:
    """A replay returns none. Loading a head exposes them, and so does a drafter with a head, for as long as it is there."""
    model = model_of("llama", Replays())
    graphs = model._pass.graphs
    slot = model.open()
    model.forward([Rows.chain(slot, 0, [2, 3, 4])])
    model.commit(slot, 2, keep_below=False)

    def replayed_of(steps: int) -> int:
        before = graphs.num_replayed
        for _ in range(steps):
            model.forward([Rows.chain(slot, 0, [5])])
            model.commit(slot, 0, keep_below=False)
        return int(graphs.num_replayed - before)

    assert replayed_of(4) > 0
    model.expose((1,))
    assert replayed_of(4) == 0
    assert model.states.shape == (1, model.network.config.hidden_size)
    model.expose(())
    assert replayed_of(4) > 0
