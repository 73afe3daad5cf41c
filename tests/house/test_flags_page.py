"""The page with the flags of other engines: ours are there, in the services that the page names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings, LocalSettings
from verifier_service.settings import VerifierSettings

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
SETTINGS = {"all": LocalSettings, "gateway": GatewaySettings, "verifier": VerifierSettings, "drafter": DrafterSettings}
FLAGS = {
    name: {f"--{field.replace('_', '-')}" for field in settings.model_fields} for name, settings in SETTINGS.items()
}
FLAG = re.compile(r"`(--[a-z-]+)")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]


def test_there_are_rows() -> None:
    assert len(ROWS) > 50
    assert {len(row) for row in ROWS} == {3}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_flags_are_ours(row: list[str]) -> None:
    """`theirs | service, service `--flag`, `--flag`; service `--flag` | remarks`: each flag is one of each service before it."""
    _, ours, remarks = row
    for part in ours.split(";"):
        flags = FLAG.findall(part)
        services = re.findall(r"\w+", part.partition("`")[0])
        assert not flags or services
        for service in services if flags else ():
            assert set(flags) <= FLAGS[service], (service, flags)
    assert set(FLAG.findall(remarks)) <= set().union(*FLAGS.values())
