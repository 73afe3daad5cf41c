"""Two tiers: `make test` runs what every change needs, `make test-all` also what is listed here (statistical tests through the services,
killed processes, deployment, model families, kernels under an interpreter, fuzzing). `make long` runs what takes hours.

One torch thread per process: tests start several processes, and their threads would compete for two cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from support.processes import RUNNING

torch.set_num_threads(1)
os.environ.setdefault("ROOTWARD_NUM_THREADS", "1")  # of the services that tests start

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_machine")

TESTS = Path(__file__).parent
SLOW = (  # beginnings of "file::test"
    "chaos/",
    "contract/",
    "deploy/",
    "interpreted/",
    "e2e/test_demo_pair_served.py",
    "e2e/test_documented_commands.py",
    "e2e/test_documented_services.py",
    "e2e/test_fuzz.py",
    "e2e/test_lm_eval.py",
    "e2e/test_many_streams.py",
    "e2e/test_openai_sdk_smollm2.py",
    "e2e/test_parameters_served.py",
    "e2e/test_plan_and_doctor.py",
    "house/test_package.py",
    "house/test_site.py",
    "integration/test_gateway_drain.py",
    "integration/test_gateway_local.py",
    "integration/test_grace_periods.py",
    "integration/test_long_prompts.py",
    "integration/test_malformed_frames.py",
    "integration/test_model_free_drafters.py",
    "integration/test_processors_served.py",
    "integration/test_real_prometheus.py",
    "integration/test_redis_kinds.py",
    "integration/test_refused_callers.py",
    "integration/test_several_models.py",
    "integration/test_slow_clients.py",
    "integration/test_tensor_parallel.py",
    "integration/test_tracing.py",
    "integration/test_train_draft_runs.py",
    "integration/test_upgrades.py",
    "integration/test_verifier_under_pressure.py",
    "statistical/test_golden.py",
    "statistical/test_law_over_a_bad_link.py",
    "statistical/test_law_through_the_wire.py",
    "statistical/test_local_exact.py",
    "statistical/test_processors_exact.py",
    "statistical/test_processors_through_the_wire.py",
    "statistical/test_samplers.py",
    "statistical/test_strategies_through_the_wire.py",
    "statistical/test_verdict.py::test_keyed_rounds_emit_the_target",
    "unit/bench/test_gpu_scripts.py",
    "unit/bench/test_strategies.py::test_a_short_run",
    *(
        f"unit/engine/test_layers.py::test_every_way_to_a_token_gives_the_same_bits[{case}"
        for case in ("grouped by three", "one head each", "windows", "llama-dtype0-256", "llama-dtype1-256")
    ),
    "unit/engine/test_kernel_cache.py::test_a_compiled",
    "unit/engine/test_triton_attention.py",
    "unit/test_cli.py::test_check_pair_on_real_folders",
    "unit/test_demo_pair.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the second tier."""
    for item in items:
        name = f"{item.path.relative_to(TESTS).as_posix()}::{item.name}"
        if name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failure shows how the log of every running service ends: an internal error is told apart only there."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for service in RUNNING:
            report.sections.append((f"log of {service.command[2]} at {service.address}", service.output()[-4000:]))
