"""`rootward download`: a folder of a model appears once, complete, whoever asks for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rootward.cli import download as module
from rootward.cli.main import main

FILES = {"config.json": b"{}", "tokenizer.json": b"{1}", "model.safetensors": b"weights", "original/part.bin": b"old"}


class Store(MemoryFileSystem):
    """Counts what is fetched; `broken` objects cannot be."""

    protocol = "counted"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fetched: ClassVar[list[str]] = []
    broken: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("counted://"))

    def get_file(self, rpath, lpath, **kwargs):
        name = rpath.partition("bucket/")[2].partition("/")[2]
        if name in self.broken:
            Path(lpath).write_bytes(b"half")
            raise OSError(f"{name}: connection reset")
        self.fetched.append(name)
        super().get_file(rpath, lpath, **kwargs)


@pytest.fixture
def store():
    fsspec.register_implementation("counted", Store, clobber=True)
    Store.fetched, Store.broken = [], set()
    Store.store.clear()
    for name, content in FILES.items():
        Store().pipe_file(f"/bucket/model/{name}", content)
    return Store


URL = "counted://bucket/model"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_lies_below_the_address_is_there(store, tmp_path):
    assert main(["download", URL, str(tmp_path / "m")]) == 0
    assert files_of(tmp_path / "m") == FILES


def test_empty_objects_that_stand_for_folders_are_no_files(store, tmp_path, monkeypatch):
    """Web consoles of S3 and GCS make them, and stores list them among the files."""
    listed = store.find
    markers = {f"/bucket/model/{name}": {"size": 0, "type": "file"} for name in ("", "original/")}
    monkeypatch.setattr(store, "find", lambda *args, **kwargs: markers | listed(*args, **kwargs))
    assert main(["download", URL, str(tmp_path / "m")]) == 0
    assert sorted(store.fetched) == sorted(FILES)


def test_a_folder_that_is_there_is_not_downloaded_again(store, tmp_path):
    main(["download", URL, str(tmp_path / "m")])
    store.fetched.clear()
    assert main(["download", URL, str(tmp_path / "m")]) == 0
    assert store.fetched == []


def test_a_tokenizer_comes_without_weights(store, tmp_path):
    assert main(["download", URL, str(tmp_path / "m"), "--tokenizer-only"]) == 0
    assert set(files_of(tmp_path / "m")) == {"config.json", "tokenizer.json"}


def test_concurrent_callers_wait_for_one_download(store, tmp_path, monkeypatch):
    """The first stands inside its download until the others have come.

    The function is called, not the command: typer sets a variable of the environment while it reads a command line, which
    two threads of a process cannot do at once.
    """
    waiting, began = threading.Barrier(3), threading.Event()
    fetch = module._from_store

    def slow(*args):
        began.set()
        waiting.wait(30)
        fetch(*args)

    monkeypatch.setattr(module, "_from_store", slow)

    def ask():
        assert began.wait(30)
        waiting.wait(30)
        module.download(URL, tmp_path / "m")
        complete.append(files_of(tmp_path / "m") == FILES)

    complete: list[bool] = []
    others = [threading.Thread(target=ask) for _ in range(2)]
    for thread in others:
        thread.start()
    module.download(URL, tmp_path / "m")
    for thread in others:
        thread.join()
    assert complete == [True, True]
    assert sorted(store.fetched) == sorted(FILES)


def test_a_broken_download_is_no_folder_and_is_continued(store, tmp_path, capsys):
    store.broken = {"model.safetensors"}
    assert main(["download", URL, str(tmp_path / "m")]) == 2
    assert "connection reset" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
    store.broken, before = set(), list(store.fetched)
    assert main(["download", URL, str(tmp_path / "m")]) == 0
    assert files_of(tmp_path / "m") == FILES
    assert sorted(store.fetched) == sorted(FILES)
    assert before  # what the first had fetched was kept


def test_an_interrupted_download_of_another_model_leaves_nothing(store, tmp_path):
    """Weights of two versions of a model have the same sizes, so they cannot be told apart by them."""
    second = {name: b"x" * len(content) for name, content in FILES.items() if name != "original/part.bin"}
    for name, content in second.items():
        store().pipe_file(f"/bucket/model-2/{name}", content)
    store.broken = {"tokenizer.json"}
    assert main(["download", URL, str(tmp_path / "m")]) == 2
    assert store.fetched
    store.broken = set()
    assert main(["download", f"{URL}-2", str(tmp_path / "m")]) == 0
    assert files_of(tmp_path / "m") == second


def test_an_interrupted_download_leaves_no_weights_beside_a_tokenizer(store, tmp_path):
    store.broken = {"tokenizer.json"}
    assert main(["download", URL, str(tmp_path / "m")]) == 2
    assert "model.safetensors" in store.fetched
    store.broken = set()
    assert main(["download", URL, str(tmp_path / "m"), "--tokenizer-only"]) == 0
    assert set(files_of(tmp_path / "m")) == {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("path", ["file", "file/m"])
def test_a_folder_that_cannot_be_made_is_refused_by_name(store, tmp_path, capsys, path):
    (tmp_path / "file").write_text("")
    assert main(["download", URL, str(tmp_path / path)]) == 2
    assert f"folder: '{tmp_path / path}'" in capsys.readouterr().err
    assert store.fetched == []


def test_a_download_is_tried_again_in_place(store, tmp_path, monkeypatch, capsys):
    """A container that ends and is started again would count as a failure of its pod, and of the pods of its group."""
    store.broken = {"model.safetensors"}
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            store.broken = set()

    monkeypatch.setattr(module.time, "sleep", pause)
    assert main(["download", URL, str(tmp_path / "m"), "--attempts", "3"]) == 0
    assert files_of(tmp_path / "m") == FILES
    assert len(pauses) == 2
    assert "connection reset" in capsys.readouterr().err


def test_attempts_end(store, tmp_path, monkeypatch):
    store.broken = {"model.safetensors"}
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    assert main(["download", URL, str(tmp_path / "m"), "--attempts", "2"]) == 2
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("counted://bucket/nothing", "has no files of a model"),
        ("nowhere://bucket/model", "cannot be read here"),
        ("hf://not a name@main", "is not hf://ORG/NAME@REVISION"),
    ],
)
def test_a_wrong_address_is_refused_by_name(store, tmp_path, capsys, url, message):
    assert main(["download", url, str(tmp_path / "m")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_an_object_cannot_leave_the_folder(store, tmp_path, capsys, monkeypatch):
    listed = {"/bucket/model/../../../evil.json": {"size": 1}}
    monkeypatch.setattr(store, "find", lambda self, root, detail: listed)
    assert main(["download", URL, str(tmp_path / "a" / "m")]) == 2
    assert "lies outside" in capsys.readouterr().err
    assert not list(tmp_path.rglob("evil*"))


def test_the_hub_is_asked_for_a_revision_and_for_files_of_the_tokenizer(tmp_path, monkeypatch):
    asked = {}

    def snapshot(repository, *, revision, local_dir, allow_patterns):
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        Path(local_dir).mkdir()

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert main(["download", "hf://org/name@abc", str(tmp_path / "m"), "--tokenizer-only"]) == 0
    assert asked == {"repository": "org/name", "revision": "abc", "patterns": list(module.TOKENIZER_FILES)}
    assert (tmp_path / "m").is_dir()
