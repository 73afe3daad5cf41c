"""The demo pair behind real processes, once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from support.processes import Service, drafter, free_port, gateway, verifier, wait_until

from rootward import Client, SamplingParams, demo


@dataclass
class Stack:
    drafter: Service
    drafter_port: int
    verifier: Service
    gateway: Service
    client: Client

    def speculating(self) -> bool:
        wanted = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        return self.client.generate("def f(", sampling=wanted).speculation.num_spec_steps > 0


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    pair = demo.paths()
    with ExitStack() as running:
        enter = running.enter_context
        port = free_port()
        grower = enter(drafter(str(pair.draft), port=port))
        target = enter(verifier(str(pair.target), [grower.address], "--max-num-seqs", "8"))
        front = enter(gateway(str(pair.target), [target.address]))
        client = enter(Client(front.address))
        wait_until(lambda: client.server_info().drafters, what="the drafter")
        yield Stack(grower, port, target, front, client)
