"""The SDK stays small: using the client loads neither torch nor the engine."""

from __future__ import annotations

import subprocess
import sys

import rootward

HEAVY = (
    "torch",
    "transformers",
    "pydantic",
    "pydantic_settings",
    "structlog",
    "starlette",
    "redis",
    "rootward.core",
    "rootward.engine",
)


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy modules a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_importing_rootward_loads_nothing_heavy():
    assert loaded_by("import rootward; rootward.RootwardError; rootward.__version__") == set()


def test_the_public_names_are_these():
    names = {name for name in rootward.__all__ if not name.endswith("Error")}
    assert names == {"AsyncClient", "Client", "SamplingParams", "Speculation", "__version__"}


def test_the_client_loads_nothing_heavy():
    assert loaded_by("import rootward; rootward.Client") == set()


def test_the_doctor_needs_no_extra():
    assert loaded_by("from rootward.doctor import machine, system") == set()


def test_a_verifier_of_a_table_loads_no_transformers():
    """It takes seconds to import, and only networks and draft heads need it."""
    found = loaded_by("import verifier_service.__main__, rootward.engine.tabular")
    assert "torch" in found
    assert "transformers" not in found
