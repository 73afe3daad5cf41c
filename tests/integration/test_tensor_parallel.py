"""One model on two processes (gloo): the same logits and text as on one, and an end that is clean or loud, never a hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from support import processes, services
from unit.engine.networks import VOCAB, tiny

from rootward.core.requests import DraftMode, Speculation, SpeculationMode
from rootward.engine.loading import load_model
from rootward.engine.model import HuggingFaceModel
from rootward.engine.parallel import check_shape
from rootward.engine.ranks import Ranks
from rootward.engine.tabular import TabularModel
from rootward.errors import ConfigurationError, RootwardError
from rootward.ports import COMMITTED, LosslessLevel, Rows
from rootward.wire.clients import RemoteVerifier
from verifier_service.settings import VerifierSettings

pytest.importorskip("accelerate", reason="transformers shards models only with accelerate")
pytestmark = pytest.mark.services

PARENTS = np.array([COMMITTED, 0, 0, 1, 1, 2, 4])
OPTIONS = {"max_slots": 4, "max_len": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny("Qwen3Config", head_dim=8).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[HuggingFaceModel, HuggingFaceModel]]:
    """The same weights alone, and on two ranks of which this process is one."""
    load = partial(load_model, str(folder), **OPTIONS)
    with Ranks.start(2, load, "cpu") as ranks:
        yield load(), load(group=ranks.group)
    assert [process.exitcode for process in ranks.processes] == [0]


def tokens(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, num).tolist()


def rounds(model: HuggingFaceModel) -> list[torch.Tensor]:
    """Logits of prompts of two sessions, of trees, after commits that move cells, and of a session that found its prefix."""
    a, b = model.open(), model.open()
    prompts = {a: tokens(37, 1), b: tokens(9, 2)}
    found = [model.forward([Rows.chain(slot, 0, prompt) for slot, prompt in prompts.items()], num_logits=[1, 1])]
    for slot, prompt in prompts.items():
        model.commit(slot, len(prompt) - 1, keep_below=False)
    trees = [Rows(slot, np.arange(7), PARENTS, np.array(tokens(7, 3 + slot))) for slot in (b, a)]
    found.append(model.forward(trees))
    model.commit(a, 4, keep_below=True)
    model.release(b)
    found.append(model.forward([Rows(a, np.array([9]), np.array([6]), np.array([5]))]))
    model.close(a)
    c = model.open(prompts[a])
    assert model.length(c) == 32
    found.append(model.forward([Rows.chain(c, 0, prompts[a][32:])]))
    for slot in (b, c):
        model.release(slot)
        model.close(slot)
    model.check_idle()
    return found


def test_logits_are_those_of_one_process(pair: tuple[HuggingFaceModel, HuggingFaceModel]) -> None:
    alone, shared = pair
    for ours, theirs in zip(rounds(shared), rounds(alone), strict=True):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_it_is_the_same_model_in_half_the_memory(pair: tuple[HuggingFaceModel, HuggingFaceModel]) -> None:
    alone, shared = pair
    assert alone.info == replace(
        shared.info, lossless=LosslessLevel.BITWISE
    )  # the fingerprint too: what one has cached, the other may use
    assert shared.info.supports_trees
    assert shared.probe_report.attention == alone.probe_report.attention
    assert shared.memory.bytes_per_token * 2 == alone.memory.bytes_per_token
    assert shared.memory.weights < 0.6 * alone.memory.weights


def test_what_cannot_be_placed_disturbs_no_rank(pair: tuple[HuggingFaceModel, HuggingFaceModel]) -> None:
    alone, shared = pair
    slot = shared.open()
    with pytest.raises(ValueError, match="token"):
        shared.forward([Rows.chain(slot, 0, [VOCAB])])
    with pytest.raises(ValueError, match="node"):
        shared.commit(slot, 3, keep_below=False)
    shared.close(slot)
    for ours, theirs in zip(rounds(shared), rounds(alone), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("temperature", "law"), [(0.0, DraftMode.SAMPLED), (1.0, DraftMode.COUPLED)])
async def test_served_text_is_that_of_one_process(
    pair: tuple[HuggingFaceModel, HuggingFaceModel], temperature: float, law: DraftMode
) -> None:
    """With trees from a drafter that is often wrong; every draw is made by rank 0 alone."""
    texts = []
    for model in pair:
        draft = TabularModel(VOCAB, seed=1)
        async with services.in_process(model, draft, num_draft_tokens=6) as system:
            wanted = services.request(
                prompt=tuple(tokens(5, 7)), temperature=temperature, law=law, seed=11, max_tokens=24
            )
            texts.append((await services.collect(system.verifier, wanted))[0])
    assert texts[0] == texts[1]


def test_shapes_that_cannot_be_shared_are_refused() -> None:
    config = tiny("LlamaConfig").config
    check_shape(config, 2)
    with pytest.raises(ConfigurationError, match="4 heads and 2 KV heads"):
        check_shape(config, 4)


def verifier(folder: Path) -> processes.Service:
    return processes.verifier(str(folder), [], "--tensor-parallel", "2", "--max-model-len", "64")


def children(pid: int) -> list[int]:
    """Processes that were spawned to share the model."""
    lists = [thread.joinpath("children").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    pids = [p for text in lists for p in text.split()]
    return [int(p) for p in pids if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "\nState:\tZ" in status.read_text()


def test_a_service_ends_when_a_rank_dies(folder: Path) -> None:
    with verifier(folder) as service:
        assert service.process is not None
        (rank,) = children(service.process.pid)
        os.kill(rank, signal.SIGKILL)
        assert service.process.wait(60) == 1
        assert "rank 1 of the model ended (exit code -9)" in service.output()


def machines(folder: Path) -> list[processes.Service]:
    """The verifiers of two machines."""
    spread = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(processes.free_port()))
    flags = ("--tensor-parallel", "2", "--max-model-len", "64", *spread)
    return [processes.verifier(str(folder), [], *flags, "--node-rank", str(rank)) for rank in (0, 1)]


def answer(address: str, probe: str) -> int:
    """Its status, 0 while nothing listens there."""
    try:
        return httpx.get(f"http://{address}/health/{probe}", timeout=60).status_code
    except httpx.TransportError:
        return 0


async def served(address: str) -> list[int]:
    wish = Speculation(SpeculationMode.DISABLED)
    async with RemoteVerifier(address) as remote:
        wanted = services.request(prompt=tuple(tokens(5, 7)), temperature=0.0, wish=wish, max_tokens=24)
        return (await services.collect(remote, wanted))[0]


async def test_two_machines_give_the_text_of_one_and_the_second_ends_with_the_first(folder: Path) -> None:
    """Both are this one: what tells them apart is who starts whom, and where they meet."""
    first, second = machines(folder)
    process = second.spawn()
    with processes.verifier(str(folder), [], "--max-model-len", "64") as alone:
        expected = await served(alone.address)
    with first:
        assert await served(first.address) == expected
        process.terminate()  # as when a whole group of pods is ended: the first drains
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        assert first.stop() == 0
        assert process.wait(60) == 0


def test_a_machine_that_follows_is_ready_when_its_ranks_have_loaded(folder: Path) -> None:
    first, second = machines(folder)
    admin = f"127.0.0.1:{processes.free_port()}"
    second.command += ["--admin-listen", admin]
    process = second.spawn()
    processes.wait_until(lambda: answer(admin, "live") == 200, what="the second machine")
    assert [answer(admin, probe) for probe in ("startup", "ready")] == [503, 503]
    with first:
        processes.wait_until(lambda: answer(admin, "ready") == 200, what="its ranks")
        assert answer(admin, "startup") == 200
    assert process.wait(60) == 0


async def test_where_a_rank_dies_its_machine_ends_and_the_first_at_its_next_step(folder: Path) -> None:
    first, second = machines(folder)
    process = second.spawn()
    with first:
        assert first.process is not None
        (rank,) = children(process.pid)
        os.kill(rank, signal.SIGKILL)
        assert process.wait(60) == 1
        assert "rank 1 of the model ended (exit code -9)" in second.output()
        with pytest.raises(RootwardError):
            await served(first.address)
        assert first.process.wait(60) == 1
        assert "a rank of the model is gone" in first.output()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nnodes", "2", "--node-rank", "2"], "node_rank: 2 is not below nnodes"),
        (
            ["--nnodes", "2", "--tensor-parallel", "3"],
            "tensor_parallel: 3 processes cannot be spread evenly over 2 machines",
        ),
        (["--nnodes", "2", "--tensor-parallel", "2"], "master_port: 0 is for one machine"),
    ],
)
def test_machines_that_do_not_fit_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        VerifierSettings.load(["--model", "tabular:vocab=8", *flags])


@pytest.mark.long
def test_ranks_end_with_the_service(folder: Path) -> None:
    with verifier(folder) as service:
        assert service.process is not None
        (rank,) = children(service.process.pid)
        os.kill(rank, signal.SIGTERM)  # meant for the service, as when a whole process group is told
        assert not gone(rank)
        assert service.stop() == 0
        processes.wait_until(lambda: gone(rank), what="rank 1")


@pytest.mark.long
def test_ranks_end_when_the_service_is_killed(folder: Path) -> None:
    with verifier(folder) as service:
        assert service.process is not None
        (rank,) = children(service.process.pid)
        service.kill()
        processes.wait_until(lambda: gone(rank), what="rank 1")
