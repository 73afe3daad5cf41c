"""What MkDocs does not do by itself: pages that lie elsewhere in the repository, references read off the code, and figures.

`<!-- figure: NAME -->` in a page becomes what `figures.NAME()` draws. Links are written as they work in the repository; a link to a file
that is no page of the site becomes plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import figures
import generated
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
ELSEWHERE = {  # page of the site -> file of the repository
    "index.md": "README.md",
    "repository/architecture.md": "ARCHITECTURE.md",
    "repository/contributing.md": "CONTRIBUTING.md",
    "repository/changelog.md": "CHANGELOG.md",
    "repository/chart.md": "deploy/helm/rootward/README.md",
    "repository/gpu-benchmarks.md": "benchmarks/GPU.md",
    **{
        f"results/{path.parent.name}/{'index' if path.stem == 'README' else path.stem}.md": str(
            path.relative_to(REPOSITORY)
        )
        for path in sorted(REPOSITORY.glob("benchmarks/results/*/*.md"))
    },
}
PAGES = {
    "reference/http.md": generated.http_api,
    "reference/settings.md": generated.settings,
    "reference/command-line.md": generated.command_line,
}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FIGURE = re.compile(r"^<!-- figure: (\w+) -->$", re.MULTILINE)
CODE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages of which more come with time are in the navigation without being listed in mkdocs.yml."""
    decisions = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))
    sections: list[dict[str, Any]] = config.nav or []
    for section in sections:
        if pages := section.get("Results"):
            pages += [page for page in ELSEWHERE if page.startswith("results/") and page.endswith("/index.md")]
        if pages := section.get("Development"):
            pages.append({"Decisions": [f"decisions/{path.name}" for path in decisions]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / source)))
    for page, write in PAGES.items():
        files.append(File.generated(config, page, content=write()))
    files.append(File.generated(config, "openapi.json", content=generated.openapi()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    source = ELSEWHERE.get(name, f"docs/{name}")
    parts = CODE.split(FIGURE.sub(lambda found: getattr(figures, found[1])(), markdown))
    known = {path: uri for uri, path in ELSEWHERE.items()}
    for i in range(0, len(parts), 2):  # the others are fenced code
        parts[i] = LINK.sub(lambda found: _link(found, name, source, known), parts[i])
    text = "".join(parts)
    return re.sub(r"\[([^\]]*)\]\(no page\)", r"\1", text)


def _link(found: re.Match[str], page: str, source: str, known: dict[str, str]) -> str:
    """A link of a file of the repository, as it works on its page."""
    path, mark, anchor = found[1].partition("#")
    if not path or ":" in path:
        return found[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    place = REPOSITORY / target
    if place.is_dir() and (place / "README.md").is_file():
        target += "/README.md"
    if target in known:
        uri = known[target]
    elif target.startswith("docs/") and not (REPOSITORY / target).is_dir():
        uri = target.removeprefix("docs/")
    elif place.exists():
        return "](no page)"
    else:
        return found[0]  # MkDocs warns
    return f"]({posixpath.relpath(uri, posixpath.dirname(page) or os.curdir)}{mark}{anchor})"
