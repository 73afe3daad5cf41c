"""Log lines are structured, carry role and request, and include those of other libraries."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from rootward.errors import ConfigurationError
from rootward.telemetry import configure_logging


@pytest.fixture(autouse=True)
def _logging_as_before():
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_role_and_request():
    stream = io.StringIO()
    configure_logging("verifier", "info", json=True, stream=stream)
    with structlog.contextvars.bound_contextvars(request_id="r1", epoch=2):
        structlog.get_logger().info("admitted", slot=3)
        logging.getLogger("grpc").warning("lost %s", "peer")
    structlog.get_logger().debug("quiet")
    ours, theirs = lines(stream)
    assert {k: ours[k] for k in ("event", "slot", "role", "request_id", "epoch", "level")} == {
        "event": "admitted",
        "slot": 3,
        "role": "verifier",
        "request_id": "r1",
        "epoch": 2,
        "level": "info",
    }
    assert (theirs["event"], theirs["request_id"]) == ("lost peer", "r1")
    assert ours["timestamp"].endswith("Z")


def test_exceptions_are_part_of_the_line():
    stream = io.StringIO()
    configure_logging("verifier", json=True, stream=stream)
    try:
        raise KeyError("missing")
    except KeyError as error:
        logging.getLogger("x").error("failed", exc_info=error)
    assert lines(stream)[0]["exception"][0]["exc_type"] == "KeyError"


def test_lines_for_people():
    stream = io.StringIO()
    configure_logging("gateway", stream=stream)
    structlog.get_logger().info("ready", address="127.0.0.1:1")
    assert "ready" in stream.getvalue()
    assert "127.0.0.1:1" in stream.getvalue()


def test_an_unknown_level_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="log_level: 'loud'"):
        configure_logging("gateway", "loud")
