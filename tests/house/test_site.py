"""The documentation site builds without a warning, is whole, and asks nobody else for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from rootward.client import Client, SamplingParams
from verifier_service.settings import VerifierSettings

ROOT = Path(__file__).resolve().parents[2]
FIGURE = re.compile(r"^<!-- figure: (\w+) -->$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "WARNING -" not in done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_every_figure_is_drawn_in_the_colours_of_the_theme(site: Path) -> None:
    found = {path: FIGURE.findall(path.read_text(encoding="utf-8")) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for names in found.values() for name in names} >= {"tree", "round", "services", "peers"}
    for path, names in found.items():
        name = path.relative_to(ROOT / "docs")
        html = (
            page(site, str(name.parent if name.stem in ("index", "README") else name.with_suffix(""))) if names else ""
        )
        assert html.count('<svg role="img"') == len(names), path
        assert len(re.findall(r"#0[0-9]0[0-9]0[0-9]\b", html)) == 0, f"{path}: a placeholder of a colour is left"


class Loaded(HTMLParser):
    """What a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        loads = given.get("src") if tag in ("script", "img", "iframe") else given.get("href") if tag == "link" else None
        if loads and re.match(r"(https?:)?//", loads):
            self.addresses.append(loads)


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = Loaded()
        loaded.feed(path.read_text(encoding="utf-8"))
        assert loaded.addresses == [], path


def test_references_are_whole(site: Path) -> None:
    settings, client, http = (page(site, f"reference/{name}") for name in ("settings", "client", "http"))
    for model in (GatewaySettings, VerifierSettings):
        for name in model.model_fields:
            assert f"--{name.replace('_', '-')}<" in settings
    for name in (*SamplingParams.__dataclass_fields__, *(name for name in vars(Client) if not name.startswith("_"))):
        assert re.search(rf'id="rootward\.client\.(types\.)?\w*\.?(Client|SamplingParams)\.{name}"|>{name}<', client), (
            name
        )
    assert "0 decodes greedily" in client  # comments behind fields are their descriptions
    for endpoint in ("POST /v1/chat/completions", "POST /v1/responses", "GET /v1/models"):
        assert endpoint in http
