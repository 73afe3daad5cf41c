"""Forms, penalties and log-probabilities on the shipped pair, through the running services."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from rootward import SamplingParams, demo
from rootward.errors import BadRequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_a_schema_always_parses(stack, temperature: float) -> None:
    def served(seed: int):
        sampling = SamplingParams(temperature, max_tokens=120, json_schema=SCHEMA, seed=seed if seed % 2 else None)
        return stack.client.generate(demo.prompts()[seed], sampling=sampling, speculation="required")

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(served, range(8)))
    whole = [r for r in results if r.finish_reason == "stop"]
    assert all(r.finish_reason == "length" for r in results if r not in whole)
    assert len(whole) >= 4
    for result in whole:
        value = json.loads(result.text)
        assert {"name", "size"} <= set(value) <= set(SCHEMA["properties"])
        assert len(value["name"]) <= 8
        assert value["size"] in range(10000)
    assert sum(r.speculation.num_spec_steps for r in results) > 0


def test_forms_over_http(stack) -> None:
    def post(**body):
        data = json.dumps({"prompt": "x = ", "temperature": 1.0, "max_tokens": 40, **body}).encode()
        request = urllib.request.Request(
            f"{stack.gateway.http}/v1/completions", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    for _ in range(5):
        _, answer = post(structured_outputs={"choice": ["yes", "no", "maybe"]})
        assert answer["choices"][0]["text"] in ("yes", "no", "maybe")
        _, answer = post(structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"})
        assert len(answer["choices"][0]["text"]) == 6
    schema = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
    status, refused = post(response_format={"type": "json_schema", "json_schema": schema})
    assert (status, refused["error"]["code"], refused["error"]["param"]) == (400, "invalid_json_schema", "json_schema")
    assert "uniqueItems" in refused["error"]["message"]


def test_logprobs_and_penalties_are_those_of_transformers(stack) -> None:
    """Greedy with a repetition penalty: each token is the best of the model's penalised scores, its logprob is the model's own."""
    model = AutoModelForCausalLM.from_pretrained(demo.paths().target, dtype=torch.float32)
    penalty = 1.3
    for prompt in demo.prompts()[:6]:
        ids = list(stack.client.tokenize(prompt))
        sampling = SamplingParams(0, max_tokens=40, repetition_penalty=penalty, logprobs=4, ignore_eos=True)
        got = stack.client.generate(ids, sampling=sampling, speculation="required")
        assert len(got.logprobs) == len(got.token_ids) == 40
        with torch.inference_mode():
            logits_TV = model(torch.tensor([[*ids, *got.token_ids]])).logits[0, len(ids) - 1 : -1]
        for i, (token, told) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
            own = logits_TV[i].log_softmax(-1)
            assert told.logprob == pytest.approx(float(own[token]), abs=2e-4)
            assert [v for _, v in told.top] == pytest.approx(own.topk(4).values.tolist(), abs=2e-4)
            scores = logits_TV[i].clone()
            seen = torch.tensor(sorted({*ids, *got.token_ids[:i]}))
            scores[seen] = torch.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
            assert float(scores[token]) >= float(scores.max()) - 1e-3


def test_a_form_needs_room(stack) -> None:
    with pytest.raises(BadRequestError, match="structured_output"):
        stack.client.generate("x", sampling=SamplingParams(regex="a", min_tokens=3))
