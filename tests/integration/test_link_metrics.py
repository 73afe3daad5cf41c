"""What the link counts while a real drafter serves over gRPC."""

from __future__ import annotations

from support.services import DRAFTING, collect, drafter_of, request, tabular_pair, until, verifier_of

from drafter_service.servicer import DrafterServicer
from rootward.wire.clients import RemoteDrafter
from rootward.wire.server import RpcServer
from verifier_service.metrics import Metrics


async def test_frames_bytes_nodes_and_times_are_counted() -> None:
    target, draft = tabular_pair()
    metrics = Metrics()

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"rootward_{name}", labels) or 0.0

    async with drafter_of(draft) as drafter, RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.1) as server:
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        async with RemoteDrafter(server.address, on_frame=metrics.links.frame) as remote:
            verifier = verifier_of(target, {"d": remote}, metrics=metrics)
            async with verifier:
                await until(lambda: verifier.pool.up)
                _, last = await collect(verifier, request(max_tokens=60))
                assert value("drafter_up", drafter="d") == 1
                assert value("drafter_circuit_state", drafter="d") == 0
    rounds = last.finish.stats.num_spec_steps
    assert value("draft_transport_seconds_count") >= rounds - 2
    assert value("draft_frame_seconds_sum") > 0
    assert value("draft_nodes_received_total") >= last.finish.stats.num_draft_tokens
    for direction in ("sent", "received"):
        assert value("draft_frames_total", direction=direction) >= rounds
        assert value("draft_bytes_total", direction=direction) > 10 * rounds
    assert value("drafter_resyncs_total", reason="lost step") == 0
