"""Processors, forms and log-probabilities through verifier, drafter and wire: speculation changes none of them."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from support import structured
from support.processed_law import PROCESSORS, STOP, processed_law
from support.services import assert_at_rest, collect, in_process, over_grpc, request, tabular_pair, until
from support.tabular import perturbed

from rootward.core.requests import (
    DraftMode,
    FinishReason,
    Form,
    Rule,
    Sampling,
    SpeculationMode,
    Stopping,
    Structure,
    VerifierRequest,
)
from rootward.engine.tabular import TabularModel
from rootward.errors import DeadlineExceeded, InvalidGrammar, InvalidRequest, Overloaded, UnsupportedParameter

PROMPT = (1, 2, 3)
OFF = SpeculationMode.DISABLED


def wanted(name: str, processors: Sampling, min_tokens: int, **more) -> VerifierRequest:
    stopping = Stopping(more.pop("max_tokens", 40), (STOP,) if min_tokens else (), min_tokens=min_tokens)
    return replace(request(name, PROMPT, stopping=stopping, **more), sampling=processors)


def greedy_text(model: TabularModel, s: Sampling, min_tokens: int, length: int) -> list[int]:
    text: list[int] = []
    while len(text) < length and not (min_tokens and text[-1:] == [STOP]):
        law = processed_law(model.log_law([*PROMPT, *text]), PROMPT, text, s, min_tokens)
        text.append(int(np.argmax(law)))
    return text


@pytest.mark.parametrize("connect", [in_process, over_grpc])
async def test_greedy_text_is_that_of_plain_decoding_with_every_processor(connect) -> None:
    target, draft = tabular_pair(vocab=6, noise=0.3)
    async with connect(target, draft) as system:
        accepted = 0
        for name, (s, least) in PROCESSORS.items():
            cold = replace(s, temperature=0.0)
            tokens, last = await collect(system.verifier, wanted(name, cold, least))
            assert tokens == greedy_text(target, cold, least, 40), name
            accepted += last.finish.stats.num_accepted_draft_tokens
        assert accepted > 0
        await assert_at_rest(system)


async def test_coupled_text_is_that_of_plain_decoding_with_every_processor() -> None:
    target, draft = tabular_pair(vocab=6, noise=0.5, slots=32)
    async with over_grpc(target, draft) as system:
        for name, (s, least) in PROCESSORS.items():
            how = {"rule": Rule.MATCH, "law": DraftMode.COUPLED, "seed": 5}
            with_trees = [wanted(f"{name}{i}", s, least, **how | {"seed": i}) for i in range(4)]
            plain = [
                replace(r, request_id=f"p{r.request_id}", speculation=replace(r.speculation, mode=OFF))
                for r in with_trees
            ]
            texts = await asyncio.gather(*(collect(system.verifier, r) for r in [*with_trees, *plain]))
            assert [t for t, _ in texts[:4]] == [t for t, _ in texts[4:]], name
            assert sum(last.finish.stats.num_accepted_draft_tokens for _, last in texts[:4]) > 0


async def test_a_stop_before_min_tokens_has_no_probability() -> None:
    target, draft = tabular_pair(vocab=4)
    async with in_process(target, draft) as system:
        for i, rule in enumerate([Rule.TRAVERSAL, Rule.TOKEN, Rule.MATCH] * 6):
            tokens, _ = await collect(
                system.verifier, wanted(f"r{i}", Sampling(), 7, rule=rule, seed=i, max_tokens=200)
            )
            assert STOP not in tokens[:7]
            assert tokens[-1] == STOP
        # A resumed generation counts from its beginning.
        resumed = replace(wanted("more", Sampling(), 7), committed=(0, 2, 3, 0, 2))
        tokens, _ = await collect(system.verifier, resumed)
        assert STOP not in tokens[:7]


@pytest.mark.parametrize(
    "how", [{"rule": Rule.TRAVERSAL}, {"rule": Rule.MATCH, "law": DraftMode.COUPLED}, {"temperature": 0.0}]
)
async def test_logprobs_are_the_target_s_own(how) -> None:
    target, draft = tabular_pair(vocab=6, noise=0.3)
    odd = Sampling(how.get("temperature", 1.0), top_k=3, presence_penalty=1.0, logit_bias=((2, 1.0),))
    async with over_grpc(target, draft) as system:
        asked = replace(request(max_tokens=30, **how), sampling=odd, logprobs=3)
        text, num_runs = list(PROMPT), 0
        async for run in system.verifier.generate(asked):
            assert len(run.logprobs) == len(run.tokens)
            num_runs += 1
            for token, told in zip(run.tokens, run.logprobs, strict=True):
                law = target.log_law(text)
                assert told.logprob == np.float32(law[token])
                best = np.argsort(-law, kind="stable")[:3]
                assert told.top == tuple((int(i), float(np.float32(law[i]))) for i in best)
                text.append(token)
        assert num_runs < 30
        silent = [run.logprobs async for run in system.verifier.generate(request("silent"))]
        assert not any(silent)


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "array", "items": {"enum": ["a", "ab", "b"]}, "maxItems": 3},
        "c": {"type": ["boolean", "null"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


def fits(value: object) -> bool:
    items = value.get("b", [])
    return (
        set(value) <= {"a", "b", "c"}
        and isinstance(value["a"], int)
        and len(items) <= 3
        and set(items) <= {"a", "ab", "b"}
        and value.get("c") in (True, False, None)
    )


@pytest.mark.parametrize(
    "how",
    [
        {"rule": Rule.TRAVERSAL},
        {"rule": Rule.TOKEN},
        {"rule": Rule.MATCH, "law": DraftMode.COUPLED},
        {"law": DraftMode.TOP_K},
    ],
)
async def test_json_always_parses_with_speculation(how) -> None:
    """Many random models and seeds; only the tokens that the limit cuts off may be missing."""
    form = Structure(Form.JSON_SCHEMA, json.dumps(SCHEMA))
    whole = accepted = 0
    for model_seed in range(3):
        target = structured.model(model_seed, sharpness=2.0, max_slots=16)
        draft = perturbed(target, 0.5, seed=9)
        async with in_process(target, draft) as system:
            system.service.grammars = structured.grammars()
            jobs = [replace(request(f"r{i}", PROMPT, seed=i, max_tokens=150, **how), structure=form) for i in range(24)]
            for tokens, last in await asyncio.gather(*(collect(system.verifier, job) for job in jobs)):
                accepted += last.finish.stats.num_accepted_draft_tokens
                if last.finish.reason.value == "stop":
                    whole += 1
                    assert tokens[-1] == structured.EOS
                    assert fits(json.loads(structured.text(tokens)))
                else:
                    assert (last.finish.reason.value, len(tokens)) == ("length", 150)
            await assert_at_rest(system)
    assert whole > 60
    assert accepted > 0


async def test_a_form_is_the_same_with_and_without_speculation_and_across_a_change_of_owner() -> None:
    target = structured.model(1, sharpness=2.0)
    draft = perturbed(target, 0.3, seed=9)
    form = Structure(Form.JSON_SCHEMA, json.dumps(SCHEMA))
    async with over_grpc(target, draft) as system:
        system.service.grammars = structured.grammars()
        for i, how in enumerate(
            [{"temperature": 0.0}, *({"rule": Rule.MATCH, "law": DraftMode.COUPLED, "seed": s} for s in range(4))]
        ):
            job = replace(request(f"r{i}", PROMPT, max_tokens=120, **how), structure=form)
            tokens, _ = await collect(system.verifier, job)
            plain = replace(job, request_id=f"p{i}", speculation=replace(job.speculation, mode=OFF))
            assert (await collect(system.verifier, plain))[0] == tokens
            resumed = replace(job, request_id=f"m{i}", committed=tuple(tokens[:5]))
            assert (await collect(system.verifier, resumed))[0] == tokens


@pytest.mark.parametrize(
    ("bad", "error", "word"),
    [
        ({"sampling": Sampling(logit_bias=((9, 1.0),))}, InvalidRequest, "logit_bias: 9 is no token"),
        ({"sampling": Sampling(allowed_token_ids=(0, 9))}, InvalidRequest, "allowed_token_ids: 9 is no token"),
        (
            {"sampling": Sampling(allowed_token_ids=(1,)), "stopping": Stopping(9, (1,), min_tokens=2)},
            InvalidRequest,
            "min_tokens: 2 leaves no token",
        ),
        ({"structure": Structure(Form.REGEX, "a")}, UnsupportedParameter, "regex: 'given' needs a model with"),
    ],
)
async def test_refusals_at_the_verifier(bad, error, word: str) -> None:
    target, draft = tabular_pair()
    async with over_grpc(target, draft) as system:
        with pytest.raises(error, match=word):
            await collect(system.verifier, replace(request(), **bad))
        await assert_at_rest(system)


async def test_a_schema_that_is_not_supported_is_refused_over_the_wire() -> None:
    target = structured.model()
    async with over_grpc(target, perturbed(target, 0.3, seed=9)) as system:
        system.service.grammars = structured.grammars()
        form = Structure(Form.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}')
        with pytest.raises(InvalidGrammar, match=r"json_schema: .*uniqueItems"):
            await collect(system.verifier, replace(request(), structure=form))
        await assert_at_rest(system)


async def test_a_form_that_the_vocabulary_cannot_spell_is_aborted_alone() -> None:
    target = structured.model(sharpness=1.0)
    async with in_process(target, perturbed(target, 0.3, seed=9)) as system:
        system.service.grammars = structured.grammars()
        good = asyncio.create_task(collect(system.verifier, request("good", stopping=Stopping(40, (), True))))
        stuck = replace(request("stuck"), structure=Structure(Form.REGEX, "aé"))  # no token holds these bytes
        tokens, last = await collect(system.verifier, stuck)
        assert last.finish.reason is FinishReason.ABORTED
        assert structured.text(tokens) == "a"
        assert len((await good)[0]) == 40
        await assert_at_rest(system)


class SlowForms:
    """Grammars whose compilation ends when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go_on = 0, threading.Event()

    def matcher(self, structure: Structure, committed: tuple[int, ...]) -> None:
        self.begun += 1
        self.go_on.wait(60)


async def test_a_form_is_compiled_only_for_a_request_that_would_be_let_in() -> None:
    target, draft = tabular_pair()
    async with in_process(target, draft, max_num_queued_reqs=2) as system:
        system.service.grammars = forms = SlowForms()
        formed = replace(request(), structure=Structure(Form.REGEX, "a"), deadline_s=None)
        with pytest.raises(InvalidRequest, match="prompt"):
            await collect(system.verifier, replace(formed, prompt=(10**6,)))
        assert forms.begun == 0
        jobs = [asyncio.create_task(collect(system.verifier, replace(formed, request_id=f"r{i}"))) for i in range(2)]
        await until(lambda: forms.begun == 2)
        with pytest.raises(Overloaded):  # those that compile count as queued
            await collect(system.verifier, replace(formed, request_id="r2"))
        forms.go_on.set()
        await asyncio.gather(*jobs)
        assert forms.begun == 2
        await assert_at_rest(system)


async def test_a_deadline_ends_the_wait_for_a_form() -> None:
    target, draft = tabular_pair()
    async with in_process(target, draft) as system:
        system.service.grammars = forms = SlowForms()
        with pytest.raises(DeadlineExceeded):
            await collect(system.verifier, replace(request(), structure=Structure(Form.REGEX, "a"), deadline_s=0.05))
        forms.go_on.set()
        await assert_at_rest(system)
