"""The trees of the rounds, as the gateway shows them to whoever asks."""

from __future__ import annotations

import httpx
import orjson


def rounds_of(url: str, **fields) -> tuple[str, list[dict]]:
    """(text, rounds) of a streamed completion."""
    body = {"prompt": "def area(width, height):", "max_tokens": 40, "stream": True, "return_trees": True, **fields}
    text, rounds = "", []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choice = orjson.loads(line[6:])["choices"][0]
                text += choice["text"]
                rounds += choice["rounds"]
    return text, rounds


def test_rounds_spell_the_text_and_their_paths_lie_in_their_trees(stack) -> None:
    text, rounds = rounds_of(stack.gateway.http, temperature=0, speculation={"mode": "required"}, ignore_eos=True)
    assert "".join(token for one in rounds for token in one["tokens"]) == text
    assert any(one["path"] for one in rounds)
    for one in rounds:
        at = 0
        for step, node in enumerate(one["path"]):
            found = one["nodes"][node - 1]
            assert found == {"token": one["tokens"][step], "parent": at}
            at = node
        assert len(one["tokens"]) == len(one["path"]) + 1  # and the bonus token


def test_without_speculation_there_are_rounds_without_trees(stack) -> None:
    text, rounds = rounds_of(stack.gateway.http, temperature=0, speculation=False, ignore_eos=True)
    assert len(rounds) == 40
    assert not any(one["nodes"] for one in rounds)
    assert "".join(one["tokens"][0] for one in rounds) == text


def test_trees_are_for_streams(stack) -> None:
    body = {"prompt": "x", "return_trees": True}
    reply = httpx.post(f"{stack.gateway.http}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "return_trees"
