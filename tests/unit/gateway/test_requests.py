"""What a request may say, and what the service makes of it."""

from dataclasses import replace

import pytest
from unit.gateway.service_for_tests import at_rest, collect, serving
from unit.gateway.verifier_for_tests import END_ID, MODEL, SpellingVerifier

from gateway.choices import Tally
from gateway.planning import make_plan
from gateway.requests import Chat, Delta, GenerateRequest
from rootward.core.requests import DraftMode, DraftStrategy, Rule, Sampling, Speculation, TokenLogprob
from rootward.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (
            GenerateRequest("a" * 400),
            ContextLengthExceeded,
            "prompt: .* leave no room; this model's maximum context length is 256 tokens, send at most 255",
        ),
        (GenerateRequest("a", max_tokens=256), ContextLengthExceeded, "max_tokens: 256 .* at most 255"),
        (GenerateRequest("a", max_tokens=0), InvalidRequest, "max_tokens: 0 is below 1"),
        (GenerateRequest("a", max_tokens=-5, truncate_prompt=-1), InvalidRequest, "max_tokens: -5 is below 1"),
        (GenerateRequest((5, 999)), InvalidRequest, "prompt: 999 is no token of a vocabulary of 330"),
        (GenerateRequest("a", stop=("",)), InvalidRequest, "stop: '' is not 1 to"),
        (GenerateRequest("a", stop=("x",) * 17), InvalidRequest, "stop: 17 strings are more than 16"),
        (GenerateRequest("a", stop_token_ids=(-1,)), InvalidRequest, "stop_token_ids: -1"),
        (GenerateRequest("a", request_id="a b"), InvalidRequest, "request_id"),
        (GenerateRequest("a", session_id="{x}"), InvalidRequest, "session_id"),
        (GenerateRequest("a\ud800"), InvalidRequest, "prompt: .* lone surrogate"),
        (
            GenerateRequest(Chat(({"role": "user", "content": "x"},))),
            UnsupportedParameter,
            "messages: .* chat template",
        ),
    ],
)
async def test_bad_requests_are_named_and_reach_no_verifier(request_, kind, words):
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        with pytest.raises(kind, match=words) as caught:
            await collect(service, request_)
        assert "\n" not in str(caught.value)
        assert not verifier.requests
        await at_rest(service, verifier)


def test_prompt_logprobs_that_no_message_can_carry_are_refused():
    model = replace(MODEL, max_positions=1 << 20)
    prompt = (5,) * 500_000
    wanted = GenerateRequest(prompt, max_tokens=1, prompt_logprobs=20)
    with pytest.raises(InvalidRequest, match="prompt_logprobs: 20 per token are too many for an answer on 499999"):
        make_plan(wanted, prompt, model)
    assert make_plan(replace(wanted, prompt_logprobs=1), prompt, model).first.prompt_logprobs == 1


def test_prompt_logprobs_of_all_choices_and_prompts_are_bounded():
    """Each takes 450 bytes: 16 choices with those of 20 tokens each ended a gateway that has a gigabyte."""
    model = replace(MODEL, max_positions=1 << 20)
    prompt = (5,) * 8000
    wanted = GenerateRequest(prompt, max_tokens=1, prompt_logprobs=20, n=16)
    with pytest.raises(InvalidRequest, match="too many for an answer on 7999 tokens in each of 16 choices"):
        make_plan(wanted, prompt, model)
    assert make_plan(replace(wanted, n=6), prompt, model).first.prompt_logprobs == 20
    told = (TokenLogprob(-1.0, ((5, -1.0),) * 20),) * 7999
    tally = Tally()
    for index in range(6):
        tally.add(Delta("r", 0, (), index=index, prompt=prompt, prompt_logprobs=told))
        tally.add(Delta("r", 0, (), index=index, prompt=prompt, prompt_logprobs=told))
    with pytest.raises(InvalidRequest, match="prompt_logprobs: 1175853 of all prompts are more than"):
        tally.add(Delta("r", 0, (), index=6, prompt=prompt, prompt_logprobs=told))


async def test_an_empty_prompt_is_the_beginning_token():
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        await collect(service, GenerateRequest(""))
        assert verifier.requests[0].prompt == (END_ID,)


async def test_a_seed_asks_for_shared_noise_unless_a_rule_is_named():
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        await collect(service, GenerateRequest("a", seed=7))
        named = await collect(service, GenerateRequest("a", seed=7, speculation=Speculation(rule=Rule.TRAVERSAL)))
        await collect(service, GenerateRequest("a"))
        await collect(service, GenerateRequest("a"))
        coupled, traversal, free, other = verifier.requests
        assert (coupled.seed, coupled.speculation.rule, coupled.speculation.law) == (7, Rule.MATCH, DraftMode.COUPLED)
        assert (traversal.seed, traversal.speculation.rule) == (7, Rule.TRAVERSAL)
        assert named.ending.warnings == ("seed_not_reproducible",)
        assert free.speculation.rule is None
        assert free.seed != other.seed


@pytest.mark.parametrize(
    ("speculation", "repeats"),
    [
        (Speculation(rule=Rule.MATCH, strategy=DraftStrategy("best_first")), True),
        (Speculation(strategy=DraftStrategy("coupled")), True),
        (Speculation(law=DraftMode.TOP_K), True),
        (
            Speculation(strategy=DraftStrategy("best_first")),
            False,
        ),  # by ratio tests, unless the verifier is set otherwise
        (Speculation(strategy=DraftStrategy("iid", (2, 2))), False),
        (Speculation(law=DraftMode.SAMPLED), False),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_that_the_text_does_not_follow_gives_a_warning(speculation, repeats, temperature):
    wanted = GenerateRequest("a", seed=7, speculation=speculation, sampling=Sampling(temperature))
    plan = make_plan(wanted, (1,), MODEL)
    assert plan.warnings == (() if repeats or not temperature else ("seed_not_reproducible",))


async def test_max_tokens_default_to_the_rest_of_the_context():
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        await collect(service, GenerateRequest("aaa", sampling=Sampling(0.0)))
        request = verifier.requests[0]
        assert len(request.prompt) + request.stopping.max_tokens == MODEL.max_positions
        assert request.deadline_s is not None


def test_a_chat_that_is_too_long_is_refused_with_field_messages():
    request = GenerateRequest(Chat(({"role": "user", "content": "x"},)))
    with pytest.raises(ContextLengthExceeded, match=r"^messages: \d+ tokens leave no room; this model's"):
        make_plan(request, (1,) * MODEL.max_positions, MODEL)
    with pytest.raises(ContextLengthExceeded, match=r"^messages: 4 tokens are more than this server takes, 3"):
        make_plan(request, (1,) * 4, MODEL, max_prompt=3)


async def test_a_verifier_with_another_model_gets_no_requests():
    fitting, other = SpellingVerifier(), SpellingVerifier(model=replace(MODEL, vocab_size=400))
    async with serving(fitting, other) as service:
        for i in range(8):
            await collect(service, GenerateRequest("a", request_id=f"r{i}"))
        assert not other.requests
        assert "vocab_size 400" in service.upstreams.mismatch


async def test_a_draining_verifier_gets_no_new_requests():
    draining, other = SpellingVerifier(draining=True), SpellingVerifier()
    async with serving(draining, other) as service:
        for i in range(8):
            await collect(service, GenerateRequest("a", request_id=f"r{i}"))
        assert not draining.requests


async def test_tokenize_and_detokenize():
    async with serving() as service:
        ids = await service.tokenize("def f(x)")
        assert await service.detokenize(ids) == "def f(x)"
        assert await service.tokenize("") == ()
        with pytest.raises(InvalidRequest, match="token_ids: 330"):
            await service.detokenize([330])
