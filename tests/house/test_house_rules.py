"""Rules that no linter checks: where packages are, and which module reads the environment."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging import requirements

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rootward", "drafter_service", "verifier_service", "gateway")
NOT_PACKAGES = ("proto", "deploy", "tests", "docs")


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "v1" not in path.relative_to(ROOT).parts)


def places(paths) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_import_name_is_ours_alone(name):
    try:
        distribution("rootward")
    except PackageNotFoundError:
        pytest.skip("rootward is not installed here; `make install` installs it")
    assert set(packages_distributions()[name]) == {"rootward"}


def test_folders_that_are_not_packages_cannot_be_imported():
    assert places(path for folder in NOT_PACKAGES for path in (ROOT / folder).rglob("__init__.py")) == []


def test_every_folder_of_a_package_is_one():
    """Without __init__.py the import contracts would not see what is inside."""
    folders = {path.parent for path in python_files(*PACKAGES)}
    assert places(sorted(folder for folder in folders if not (folder / "__init__.py").exists())) == []


def test_only_the_host_module_and_settings_sources_read_the_environment():
    reads = re.compile(r"\b(os\.environ|getenv|from os import .*environ)\b")
    readers = [path for path in python_files(*PACKAGES) if reads.search(path.read_text(encoding="utf-8"))]
    assert set(places(readers)) <= {"rootward/host.py"}


def test_the_bounds_of_the_dependencies_admit_the_committed_stubs():
    """Stubs refuse at import a grpcio or protobuf older than what they were generated with."""
    stubs = [path.read_text(encoding="utf-8") for path in (ROOT / "rootward" / "v1").glob("*_pb2*.py")]
    needed = {
        "grpcio": re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", "\n".join(stubs)),
        "protobuf": re.search(r"Protobuf Python Version: ([\d.]+)", "\n".join(stubs)),
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, match in needed.items():
        bound = next(re.search(r">=([\d.]+)", line) for line in project["dependencies"] if re.match(rf"{name}\W", line))
        assert match, name
        assert bound, name
        assert version(bound[1]) >= version(match[1]), f"{name}: pyproject.toml allows {bound[1]}, the stubs {match[1]}"


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_constraints_fit_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    for line in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]:
        requirement = requirements.Requirement(line)
        if requirement.name == project["name"]:  # an extra made of others
            assert requirement.extras <= set(project["optional-dependencies"]), line
            continue
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), line
