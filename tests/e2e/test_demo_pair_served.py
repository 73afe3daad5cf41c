"""The whole path on real input: SDK → gateway → verifier ↔ drafter, as processes, with the shipped pair."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rootward import SamplingParams, demo
from rootward.errors import BadRequestError

PROMPTS, LENGTH = 50, 64


@pytest.fixture(scope="module")
def reference() -> list[tuple[list[int], list[int]]]:
    """(prompt ids, what plain transformers decodes greedily), in float32."""
    path = demo.paths().target
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    texts = []
    for prompt in demo.prompts()[:PROMPTS]:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=LENGTH, attention_mask=torch.ones_like(ids))
        texts.append((ids[0].tolist(), out[0, ids.shape[1] :].tolist()))
    return texts


def test_greedy_text_equals_plain_transformers_token_by_token(stack, reference) -> None:
    def served(ids: list[int]):
        sampling = SamplingParams(temperature=0, max_tokens=LENGTH)
        return stack.client.generate(ids, sampling=sampling, speculation="required")  # trees in every round

    assert len(reference) == PROMPTS
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(served, [ids for ids, _ in reference]))
    for (_, wanted), got in zip(reference, results, strict=True):
        assert list(got.token_ids) == wanted
    assert sum(r.speculation.num_accepted_draft_tokens for r in results) > 0.2 * PROMPTS * LENGTH


def test_one_session_alone_speculates_and_is_equal_too(stack, reference) -> None:
    for ids, wanted in reference[:5]:
        got = stack.client.generate(
            ids, sampling=SamplingParams(temperature=0, max_tokens=LENGTH), speculation="required"
        )
        assert list(got.token_ids) == wanted
        assert got.speculation.num_plain_steps <= 0.2 * got.speculation.num_target_passes


def test_streamed_text_is_the_decoded_text_with_accepted_flags(stack) -> None:
    prompt = demo.prompts()[3]
    with stack.client.stream(prompt, sampling=SamplingParams(temperature=0.8, max_tokens=80)) as stream:
        deltas = list(stream)
        result = stream.get_final_result()
    assert "".join(d.text for d in deltas) == result.text
    assert stack.client.detokenize(result.token_ids) == result.text
    assert sum(result.accepted) == result.speculation.num_accepted_draft_tokens
    assert "".join(text for d in deltas for text, _ in d.spans) == result.text


def test_a_seed_repeats_the_text_whatever_is_drafted(stack) -> None:
    wanted = SamplingParams(temperature=1.0, max_tokens=48, seed=1234)
    texts = [
        stack.client.generate("import ", sampling=wanted, speculation=mode).text for mode in (True, False, "required")
    ]
    assert texts[0] == texts[1] == texts[2]


def test_stop_strings_end_the_text_before_them(stack) -> None:
    free = stack.client.generate("def main():\n", sampling=SamplingParams(temperature=0, max_tokens=60))
    stop = free.text[12:15]
    cut = stack.client.generate("def main():\n", sampling=SamplingParams(temperature=0, max_tokens=60, stop=stop))
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop", stop)


def test_completions_over_http_stream_and_do_not(stack) -> None:
    def post(**body):
        data = json.dumps({"prompt": "class Node:", "temperature": 0, "max_tokens": 32, **body}).encode()
        request = urllib.request.Request(
            f"{stack.gateway.http}/v1/completions", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    whole = json.loads(post())
    assert whole["object"] == "text_completion"
    assert whole["usage"]["completion_tokens"] == 32
    lines = [line[6:] for line in post(stream=True).splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line) for line in lines[:-1]]
    assert "".join(p["choices"][0]["text"] for p in pieces if p["choices"]) == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": -1.0}, ["temperature", "-1"]),
        ({"top_p": 0.0}, ["top_p", "0.0"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"max_tokens": 100_000}, ["max_tokens", "100000", "1024"]),
    ],
)
def test_bad_requests_are_refused_with_field_value_and_fix_and_others_continue(stack, sampling, words) -> None:
    prompt = demo.prompts()[0]
    wanted = SamplingParams(temperature=0, max_tokens=96)
    quiet = stack.client.generate(prompt, sampling=wanted).text
    with stack.client.stream(prompt, sampling=wanted) as running:
        deltas = iter(running)
        first = next(deltas).text
        with pytest.raises(BadRequestError) as refused:
            stack.client.generate("x", sampling=SamplingParams(**sampling))
        assert all(word in str(refused.value) for word in words)
        assert first + "".join(d.text for d in deltas) == quiet


def test_a_prompt_longer_than_the_context_is_refused(stack) -> None:
    with pytest.raises(BadRequestError, match="1024"):
        stack.client.generate([5] * 2000, sampling=SamplingParams(max_tokens=4))
