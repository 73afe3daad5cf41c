"""`rootward download` from servers that speak S3's protocol and Google Cloud Storage's, called as the chart's init container calls it.

The packages are not in the extra `dev`, since they choose versions of their own: in a virtual environment beside it,
`pip install s3fs 'moto[server]' gcsfs gcp-storage-emulator`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.helm import ROOT
from support.processes import free_port

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

FILES = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "part-1.safetensors": b"w" * (6 << 20), "x/y.bin": b"y"}
MODEL = "llama-1b"


@dataclass(frozen=True)
class Store:
    scheme: str
    filesystem: Any
    variables: dict[str, str]  # of the Secret that `model.secret` names
    bucket: str = field(default_factory=lambda: f"models-{uuid4().hex}")

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}/{MODEL}"


@pytest.fixture
def s3() -> Iterator[Store]:
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    variables = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    try:
        filesystem = s3fs.S3FileSystem(key="a", secret="b", endpoint_url=endpoint, skip_instance_cache=True)
        yield Store("s3", filesystem, variables)
    finally:
        server.stop()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    port = free_port()
    variables = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "FSSPEC_GCS_TOKEN": "anon"}
    variables["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # a protocol that the emulator does not speak
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    gcsfs = pytest.importorskip("gcsfs")  # it reads them when it is imported
    server = emulator.create_server("127.0.0.1", port, in_memory=True)
    server.start()
    try:
        yield Store("gs", gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True), variables)
    finally:
        server.stop()


@pytest.fixture(params=["s3", "gcs"])
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = request.getfixturevalue(request.param)
    made.filesystem.mkdir(made.bucket)
    for name, content in FILES.items():
        made.filesystem.pipe_file(f"{made.bucket}/{MODEL}/{name}", content)
    made.filesystem.pipe_file(f"{made.bucket}/{MODEL}-2/config.json", b"another model")
    made.filesystem.pipe_file(f"{made.bucket}/{MODEL}/", b"")  # what consoles make of a folder
    return made


def download(store: Store, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rootward.cli", "download", *words]
    variables = {"PYTHONPATH": str(ROOT), "HOME": "/tmp", **store.variables}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_whole(store: Store, tmp_path: Path) -> None:
    done = download(store, store.url, str(tmp_path / "m"))
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "m") == FILES


def test_a_tokenizer_comes_alone(store: Store, tmp_path: Path) -> None:
    done = download(store, store.url, str(tmp_path / "m"), "--tokenizer-only")
    assert done.returncode == 0, done.stderr
    assert set(files_of(tmp_path / "m")) == {"config.json", "tokenizer.json"}


def test_a_folder_that_is_not_there_is_named(store: Store, tmp_path: Path) -> None:
    done = download(store, f"{store.url}-3", str(tmp_path / "m"))
    assert done.returncode == 2
    assert f"{store.url}-3" in done.stderr
    assert not (tmp_path / "m").exists()
