"""A draft head in drafter services: features follow commits; without them, or without a drafter, the text stays the target's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from integration.test_head_drafts import greedy_text, target_of
from support.heads import STRATEGIES, TabularHead
from support.services import (
    DRAFTING,
    assert_at_rest,
    collect,
    drafter_of,
    over_grpc,
    request,
    tabular_pair,
    until,
    verifier_of,
)

from drafter_service.__main__ import build, load
from drafter_service.growth_loop import DrafterService
from drafter_service.servicer import DrafterServicer
from drafter_service.settings import DrafterSettings
from gateway.local import _deployment
from gateway.settings import LocalSettings
from rootward.core.frames import DraftHead, ToDrafter
from rootward.core.requests import DraftMode, Speculation, SpeculationMode
from rootward.engine.tabular import TabularModel
from rootward.errors import ConfigurationError
from rootward.wire.clients import RemoteDrafter
from rootward.wire.server import RpcServer
from verifier_service.send_buffer import SendBuffer
from verifier_service.service import VerifierService
from verifier_service.settings import VerifierSettings

GREEDY = {"temperature": 0.0, "max_tokens": 80}


def sent_bytes(verifier: VerifierService) -> float:
    """Of features."""
    return verifier.metrics.registry.get_sample_value("rootward_draft_feature_bytes_total") or 0.0


async def efficiency(
    target: TabularModel, *, sessions: int = 1, head: dict[str, Any] | None = None, int8: bool = False, **wanted: Any
) -> tuple[list[list[int]], float]:
    """Texts of some sessions at once, and tokens per round."""
    own = TabularHead(target, **(head or {}))
    async with over_grpc(target, own, fuse=TabularHead(target, **(head or {})), int8=int8) as system:
        jobs = [collect(system.verifier, request(f"r{i}", (1, 2, 3 + i), **wanted)) for i in range(sessions)]
        found = await asyncio.gather(*jobs)
        assert sent_bytes(system.service) > 0
        await assert_at_rest(system)
    stats = [last.finish.stats for _, last in found]
    rounds = sum(one.num_spec_steps + one.num_plain_steps for one in stats)
    return [tokens for tokens, _ in found], sum(len(tokens) for tokens, _ in found) / rounds


@pytest.mark.parametrize("sessions", [1, 5])
async def test_greedy_text_is_that_of_plain_decoding_in_fewer_passes(sessions: int) -> None:
    target = target_of()
    texts, tokens = await efficiency(target, sessions=sessions, **GREEDY)
    assert texts == [greedy_text(target, (1, 2, 3 + i), 80) for i in range(sessions)]
    assert tokens > 2.5


async def test_features_that_are_wrong_lost_or_coarse_cost_acceptance_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    expected = greedy_text(target, (1, 2, 3), 80)
    found = {}
    (found["right"], right) = await efficiency(target, **GREEDY)
    (found["int8"], int8) = await efficiency(target, int8=True, **GREEDY)
    assert int8 == right  # fine enough here
    (found["coarse"], coarse) = await efficiency(target, int8=True, head={"beside": 1e4}, **GREEDY)
    (found["wrong"], wrong) = await efficiency(target, head={"wrong": 3}, **GREEDY)
    take = SendBuffer.take

    async def lossy(buffer: SendBuffer) -> ToDrafter:
        frame = await take(buffer)
        return replace(
            frame, features=(), commits=tuple(replace(c, features=None) if c.base_len % 2 else c for c in frame.commits)
        )

    monkeypatch.setattr(SendBuffer, "take", lossy)
    (found["lost"], lost) = await efficiency(target, **GREEDY)
    assert all(texts == [expected] for texts in found.values())
    assert all(1.0 < tokens < right - 0.3 for tokens in (coarse, wrong, lost))


async def test_text_under_a_seed_does_not_depend_on_the_head() -> None:
    target = target_of()
    wanted = {"law": DraftMode.COUPLED, "seed": 7}
    texts, tokens = await efficiency(target, **wanted)
    async with verifier_of(target, {}) as verifier:
        plain, _ = await collect(verifier, request("r0", mode=SpeculationMode.DISABLED, **wanted))
    assert texts == [plain]
    assert tokens > 1.5


@pytest.mark.parametrize("name", STRATEGIES)
async def test_a_head_grows_by_every_strategy(name: str) -> None:
    strategy, rule = STRATEGIES[name]
    wish = Speculation(SpeculationMode.REQUIRED, strategy=strategy, **rule)
    _, tokens = await efficiency(target_of(), wish=wish, max_tokens=60)
    assert tokens > 1.2


@pytest.mark.parametrize("numbers", [2, 10, 1 << 17])
async def test_the_end_of_a_long_prompt_is_sent_in_parts(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootward.core.frames.FEATURE_NUMBERS", numbers)
    target = target_of()
    prompt = tuple(i % 12 for i in range(100))
    shape = {"feature_window": 16, "max_num_batched_tokens": 24}
    async with over_grpc(target, TabularHead(target), fuse=TabularHead(target), **shape) as system:
        tokens, last = await collect(system.verifier, request(prompt=prompt, temperature=0.0, max_tokens=60))
        read = 2 * 2 * (16 + len(tokens))  # bfloat16, two numbers a feature
        assert read - 80 <= sent_bytes(system.service) <= read
    assert tokens == greedy_text(target, prompt, 60)
    assert last.finish.stats.block_efficiency > 2.0


async def test_no_more_positions_are_sent_than_the_head_sees() -> None:
    target = target_of()
    head = TabularHead(target)
    head.window = 16
    prompt = tuple(i % 12 for i in range(100))
    async with over_grpc(target, TabularHead(target), fuse=head) as system:
        tokens, _ = await collect(system.verifier, request(prompt=prompt, temperature=0.0, max_tokens=60))
        read = 2 * 2 * (16 + len(tokens))  # bfloat16, two numbers a feature
        assert read - 80 <= sent_bytes(system.service) <= read


async def test_nothing_is_captured_or_sent_where_no_drafter_has_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tabular_pair()
    exposed: list[tuple[int, ...]] = []
    monkeypatch.setattr(target, "expose", exposed.append)
    async with over_grpc(target, draft, fuse=TabularHead(target)) as system:
        await collect(system.verifier, request())
        assert sent_bytes(system.service) == 0
    assert exposed == []


async def test_states_are_captured_while_a_session_may_draft_and_no_longer() -> None:
    target = target_of()
    async with over_grpc(target, TabularHead(target), fuse=TabularHead(target)) as system:
        await collect(system.verifier, request())
        assert target._exposed == (0,)
        sent = sent_bytes(system.service)
        await collect(system.verifier, request("plain", mode=SpeculationMode.DISABLED))
        assert target._exposed == ()
        assert sent_bytes(system.service) == sent


async def test_a_verifier_without_the_same_head_is_refused_with_the_fix_and_decodes_plainly() -> None:
    target = target_of()
    for fuse in (None, TabularHead(target, noise=0.9)):
        drafter = drafter_of(TabularHead(target))
        verifier = verifier_of(target, {"d": drafter}, fuse=fuse)
        async with drafter, verifier:
            await until(lambda v=verifier: any(link.refusal for link in v.pool.links))
            assert "--draft-head FOLDER" in verifier.pool.links[0].refusal
            tokens, _ = await collect(verifier, request(mode=SpeculationMode.AUTO, **GREEDY))
        assert tokens == greedy_text(target, (1, 2, 3), 80)


@asynccontextmanager
async def two_drafters(
    target: TabularModel,
) -> AsyncIterator[tuple[VerifierService, list[tuple[DrafterService, RpcServer]]]]:
    """A verifier, and two drafters with a head at addresses of their own."""
    async with AsyncExitStack() as stack:
        drafters, remotes = [], {}
        for number in range(2):
            drafter = await stack.enter_async_context(drafter_of(TabularHead(target), incarnation=number + 1))
            server = await stack.enter_async_context(RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.0))
            DrafterServicer(drafter, drafter.describe).register(server)
            await server.start()
            drafters.append((drafter, server))
            remotes[f"d{number}"] = await stack.enter_async_context(RemoteDrafter(server.address))
        verifier = await stack.enter_async_context(verifier_of(target, remotes, fuse=TabularHead(target)))
        await until(lambda: len(verifier.pool.up) == 2)
        yield verifier, drafters


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "drains"])
async def test_sessions_of_a_drafter_that_goes_get_trees_from_another(dies: bool) -> None:
    target = target_of(max_positions=2048, step_ms=1.0)
    async with two_drafters(target) as (verifier, drafters):
        jobs = [
            asyncio.create_task(collect(verifier, request(f"r{i}", (1, 2, 3 + i), temperature=0.0, max_tokens=600)))
            for i in range(4)
        ]
        await until(lambda: all(drafter.grower.trees for drafter, _ in drafters))
        (drafter, server), (other, _) = drafters
        if dies:
            await server.__aexit__(None, None, None)
        else:
            await drafter.drain()
        await until(lambda: len(other.grower.trees) == 4 or any(job.done() for job in jobs))
        found = await asyncio.gather(*jobs)
    for i, (tokens, last) in enumerate(found):
        assert tokens == greedy_text(target, (1, 2, 3 + i), 600)
        assert last.finish.stats.block_efficiency > 2.0


def test_serve_all_gives_both_services_the_head_and_the_drafter_its_target(tmp_path: Path) -> None:
    settings = LocalSettings(model="there", draft_model="head:here", redis_url="none")
    with ExitStack() as reserved:
        deployment = _deployment(settings, str(tmp_path), reserved=reserved)
    verifier = VerifierSettings.load(deployment.verifier.command[3:])
    drafter = DrafterSettings.load(deployment.drafters[0].command[3:])
    assert (verifier.head_folder, verifier.local_draft) == ("here", "ngram")
    assert (drafter.model, drafter.target) == ("head:here", "there")


async def test_a_drafter_process_reports_its_head_and_the_type_of_features() -> None:
    settings = DrafterSettings(model="head:of a test", feature_dtype="int8")
    head = TabularHead(target_of())
    async with build(head, settings) as drafter:
        assert drafter.describe().ack.head == DraftHead(head.info.fingerprint, 2, int8=True)
    async with build(target_of(), settings) as drafter:
        assert drafter.describe().ack.head is None


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({}, "target"),
        ({"target": "there", "cuda_graphs": True}, "cuda_graphs"),
        ({"target": "there", "target_tokenizer": "there"}, "target_tokenizer"),
        ({"target": "./nowhere"}, "model: './nowhere' cannot be read"),
    ],
)
async def test_settings_that_no_head_can_be_loaded_with_are_refused(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}"):
        await load(DrafterSettings(model="head:somewhere", **wrong))
