"""Only administrators drain, watch, abort and reflect: with keys by scope, without keys on a loopback address alone."""

import pytest

from gateway.auth import Access
from rootward.errors import PermissionDenied

ADMIN = [
    "/rootward.v1.Control/Drain",
    "/rootward.v1.Control/WatchSession",
    "/rootward.v1.Control/Abort",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


class Call:
    def invocation_metadata(self):
        return ()


@pytest.mark.parametrize("method", ADMIN)
def test_a_public_gateway_without_keys_refuses_administration(method):
    with pytest.raises(PermissionDenied, match="start it with --api-keys, or on a loopback address"):
        Access(None, ["m"]).check_rpc(method, Call())
    Access(None, ["m"], local=True).check_rpc(method, Call())


@pytest.mark.parametrize("method", ["/rootward.v1.Inference/Generate", "/rootward.v1.Control/GetServerInfo"])
def test_a_public_gateway_without_keys_accepts_all_callers(method):
    Access(None, ["m"]).check_rpc(method, Call())
