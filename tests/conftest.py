"""One thread per process: tests start several, and threads of different processes that fight for two cores slow one another down.

With `pytest -n 2` (what `make test` runs) everything that starts services runs in order in one worker while the other works
through the rest, a file at a time: services get a whole core, and a file's models are built once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

SERVICES = {
    "chaos",
    "e2e",
    "integration",
}  # their processes and ports; the order inside a worker is the order of the files


@pytest.hookimpl(tryfirst=True)  # before xdist turns the mark into a part of the node id
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Says which tests must stay together when they are dealt to workers."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    here = Path(__file__).parent
    for item in items:
        part = item.path.relative_to(here)
        item.add_marker(pytest.mark.xdist_group("services" if part.parts[0] in SERVICES else part.as_posix()))
