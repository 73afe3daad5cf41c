"""Killing processes in mid-stream: no request fails, no token is lost, repeated or changed; speculation comes back."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
from support.processes import STOP_S, drafter, free_port, gateway, verifier, wait_until

from rootward import Client, SamplingParams, Speculation
from rootward.errors import BadRequestError

TARGET = "tabular:vocab=8,seed=3,sharpness=2"
DRAFT = "tabular:vocab=8,seed=3,sharpness=2,noise=0.4,noise_seed=1"
LONG = SamplingParams(temperature=0, max_tokens=1500)


@pytest.fixture
def services():
    with ExitStack() as running:
        port = free_port()
        grower = running.enter_context(drafter(DRAFT, port=port))
        target = running.enter_context(verifier(TARGET, [grower.address], "--local-draft", "none"))
        front = running.enter_context(gateway(TARGET, [target.address]))
        client = running.enter_context(Client(front.address))
        yield running, port, grower, target, client


def text_of(client: Client, **options):
    return client.generate([1, 2], sampling=LONG, **options)


def test_a_drafter_killed_in_mid_stream_changes_nothing_and_a_new_one_is_used(services) -> None:
    running, port, grower, _, client = services
    undisturbed = text_of(client, speculation="disabled").token_ids
    wait_until(lambda: client.server_info().drafters, what="the drafter")
    tokens: list[int] = []
    with client.stream([1, 2], sampling=LONG, speculation=Speculation(mode="required")) as stream:
        for number, delta in enumerate(stream):
            tokens += delta.token_ids
            if number == 20:
                grower.kill()
        result = stream.get_final_result()
    assert tuple(tokens) == undisturbed == result.token_ids
    assert result.finish_reason == "length"
    assert result.speculation.num_spec_steps > 0  # before the kill
    assert result.speculation.num_plain_steps > 0  # after it
    running.enter_context(drafter(DRAFT, port=port))

    def speculates() -> bool:
        wanted = SamplingParams(temperature=0, max_tokens=60)
        try:
            return client.generate([1, 2], sampling=wanted, speculation="required").speculation.num_spec_steps > 0
        except BadRequestError:  # no drafter yet
            return False

    wait_until(speculates, 90, "speculation to resume")
    assert text_of(client).token_ids == undisturbed


def test_a_drafter_killed_again_and_again_never_fails_a_request(services) -> None:
    running, port, grower, _, client = services
    undisturbed = text_of(client, speculation="disabled").token_ids
    stop = threading.Event()

    def churn() -> None:
        victim = grower
        while not stop.is_set():
            time.sleep(0.3)
            victim.kill()
            victim = running.enter_context(drafter(DRAFT, port=port))

    killer = threading.Thread(target=churn)
    killer.start()
    try:
        for _ in range(6):
            assert text_of(client).token_ids == undisturbed
    finally:
        stop.set()
        killer.join()


def test_sigterm_finishes_what_runs_and_ends_with_code_0(services) -> None:
    _, _, grower, target, client = services
    undisturbed = text_of(client, speculation="disabled").token_ids
    with client.stream([1, 2], sampling=LONG) as stream:
        deltas = iter(stream)
        first = next(deltas)
        target.process.terminate()
        grower.process.terminate()
        rest = [token for delta in deltas for token in delta.token_ids]
    assert (*first.token_ids, *rest) == undisturbed
    assert target.process.wait(STOP_S) == 0
    assert grower.process.wait(STOP_S) == 0
