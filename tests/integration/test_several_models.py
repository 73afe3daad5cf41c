"""Two models behind one gateway, as services: the openai package and gRPC, a pool of drafters each, signals of scaling apart."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import grpc
import openai
import pytest
import yaml
from support.processes import Service, drafter, free_port, verifier, wait_until
from support.redis import running_redis

from rootward import Client, SamplingParams, demo
from rootward.v1 import external_scaler_pb2 as pb
from rootward.v1.external_scaler_pb2_grpc import ExternalScalerStub

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

PROMPT = "def fibonacci(n):"
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """(gateway, address of its scaler). Both pools have the same draft model; which pool a verifier uses is told by its name."""
    pair, path, scaler = demo.paths(), tmp_path_factory.mktemp("gateway") / "gateway.yaml", free_port()
    weights = {"large": str(pair.target), "small": str(pair.draft)}
    with running_redis() as url, ExitStack() as stack:
        registry = ("--redis-url", url)
        for name, folder in weights.items():
            stack.enter_context(drafter(str(pair.draft), *registry, "--pool", f"{name}-default"))
            named = ("--served-model-name", name)
            stack.enter_context(verifier(folder, [f"redis:{name}-default"], *registry, *named))
        content = {
            "models": [{"model": w, "served_model_name": name, "verifiers": "redis:"} for name, w in weights.items()],
            "redis_url": url,
            "listen": "127.0.0.1:0",
            "http_listen": "127.0.0.1:0",
            "scaler_listen": f"127.0.0.1:{scaler}",
        }
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        gateway = stack.enter_context(Service("rootward.cli", "serve", "gateway", "--config", str(path)))
        with Client(gateway.address) as client:
            wait_until(lambda: len(client.server_info().drafters) == 2, what="both pools")
        yield gateway, f"127.0.0.1:{scaler}"


def test_each_request_gets_the_text_of_its_model_over_both_protocols(running):
    gateway, _ = running
    texts: dict[str, set[str]] = {"large": set(), "small": set()}
    with (
        openai.OpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as http,
        Client(gateway.address) as client,
    ):
        assert [model.id for model in http.models.list()] == ["large", "small"]
        assert [model.name for model in client.server_info().models] == ["large", "small"]
        for name, found in texts.items():
            whole = http.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=32)
            assert whole.model == name
            found.add(whole.choices[0].text)
            parts = http.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=32, stream=True)
            found.add("".join(part.choices[0].text for part in parts if part.choices))
            found.add(client.generate(PROMPT, sampling=GREEDY, model=name).text)
        with pytest.raises(openai.NotFoundError, match="use 'large' or 'small'"):
            http.completions.create(model="medium", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match="several models are served"):
            http.completions.create(model="", prompt=PROMPT)
    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts["large"] != texts["small"]


def test_signals_of_scaling_are_apart(running):
    """Sessions of one model call for drafters of its own pool alone."""
    gateway, address = running

    def sessions(pool: str) -> float:
        metadata = {"pool": pool, "signal": "sessions", "target": "1"}
        asked = pb.GetMetricsRequest(scaledObjectRef=pb.ScaledObjectRef(scalerMetadata=metadata))
        return stub.GetMetrics(asked, timeout=60).metricValues[0].metricValueFloat

    with grpc.insecure_channel(address) as channel, Client(gateway.address) as client:
        stub, over = ExternalScalerStub(channel), threading.Event()

        def work() -> None:
            while not over.is_set():
                client.generate(
                    PROMPT,
                    sampling=SamplingParams(max_tokens=200, ignore_eos=True),
                    model="large",
                    speculation="required",
                )

        def demanded_of_one_pool() -> bool:
            return sessions("large-default") > 0 and sessions("small-default") == 0

        worker = threading.Thread(target=work)
        worker.start()
        try:
            wait_until(demanded_of_one_pool, what="demand of the pool of the large model alone")
        finally:
            over.set()
            worker.join()
