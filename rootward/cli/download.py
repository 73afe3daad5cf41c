"""`rootward download URL FOLDER`: fetches a model once for all processes that share the folder's file system."""

from __future__ import annotations

import fcntl
import shutil
import time
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TextIO

import typer

from rootward.errors import ConfigurationError

TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
HUB = "hf://"
PAUSE_S = 30.0


def download(
    url: Annotated[str, typer.Argument(help="hf://ORG/NAME@REVISION, or a folder at s3://, gs://, file:// …")],
    folder: Annotated[Path, typer.Argument(help="New folder. If it exists, nothing is downloaded.")],
    tokenizer_only: Annotated[
        bool, typer.Option("--tokenizer-only", help="Only tokenizer and configuration files, no weights.")
    ] = False,
    attempts: Annotated[int, typer.Option(min=1, help="Maximum number of attempts, half a minute apart.")] = 1,
) -> None:
    """Download a model into a folder that appears when it is complete.

    Processes that ask for the same folder at the same time wait for the one that downloads. A download that was interrupted is continued
    by the next process. Credentials come from variables: HF_TOKEN, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS and others.
    """
    if not url.strip():  # a store of files would read that as the current folder
        raise ConfigurationError(f"url: {url!r} names nothing; give hf://ORG/NAME@REVISION or the folder of a model")
    if not folder.name:  # as of "", "." and "/"
        raise ConfigurationError(f"folder: '{folder}' is no new folder; name one that does not exist yet")
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"folder: '{folder}' is a file; name a new folder")
    with _lock(folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel or the file server releases it when a process dies
        if folder.is_dir():
            typer.echo(f"{folder} is there already", err=True)
            return
        partial = folder.with_name(f"{folder.name}.partial")
        patterns = TOKENIZER_FILES if tokenizer_only else ("*",)
        _keep_if_of(f"{url} {' '.join(patterns)}", partial, lock)
        for left in reversed(range(attempts)):
            try:
                _fetch(url, partial, patterns)
                break
            except ConfigurationError as error:
                if not left:
                    raise
                typer.echo(f"{error}; attempts left: {left}", err=True)
                time.sleep(PAUSE_S)
        partial.rename(folder)
    typer.echo(f"downloaded {url} to {folder}", err=True)


def _lock(folder: Path) -> TextIO:
    """The file beside the folder that is locked during a download."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder.with_name(f"{folder.name}.lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"folder: '{folder}' cannot be made ({error}); name another one") from None


def _keep_if_of(source: str, partial: Path, lock: TextIO) -> None:
    """Removes an interrupted download of another source than the one that the lock file names, and names this one there. Files of both
    would be one folder: those that are as long as their objects count as complete."""
    lock.seek(0)
    if lock.read() == source:
        return
    if partial.exists():
        shutil.rmtree(partial)
    lock.truncate(0)
    lock.write(source)
    lock.flush()


def _fetch(url: str, partial: Path, patterns: tuple[str, ...]) -> None:
    try:
        if url.startswith(HUB):
            _from_hub(url, partial, patterns)
        else:
            _from_store(url, partial, patterns)
    except ImportError as error:
        raise ConfigurationError(
            f"url: {url} needs a package ({error}); run pip install 'rootward[gateway]'"
        ) from error
    except ConfigurationError:
        raise
    except Exception as error:  # hub and stores raise kinds of their own
        raise ConfigurationError(
            f"url: {url} was not downloaded ({error}); check address, credentials and disk"
        ) from error


def _from_hub(url: str, partial: Path, patterns: tuple[str, ...]) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repository, _, revision = url.removeprefix(HUB).partition("@")
    try:
        snapshot_download(repository, revision=revision or None, local_dir=partial, allow_patterns=list(patterns))
    except HFValidationError as error:
        raise ConfigurationError(f"url: {url} is not hf://ORG/NAME@REVISION ({error})") from error


def _from_store(url: str, partial: Path, patterns: tuple[str, ...]) -> None:
    """Every object below the URL. A file that is as long as its object is complete: files get their names when they are."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        store, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"url: {url} cannot be read here ({error}); install the package of fsspec for its store, such as s3fs or gcsfs"
        ) from error
    objects: dict[str, dict[str, Any]] = store.find(root, detail=True)
    prefix = root.rstrip("/") + "/"
    found = {
        name.removeprefix(prefix): info["size"]
        for name, info in objects.items()
        if name.startswith(prefix) and not name.endswith("/")  # an empty object that consoles make for a folder
    }
    wanted = {name: size for name, size in found.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    if not wanted:
        raise ConfigurationError(f"url: {url} has no files of a model; name the folder that holds config.json")
    for name, size in wanted.items():
        if ".." in PurePosixPath(name).parts:
            raise ConfigurationError(f"url: {url} has an object {name!r} that lies outside of it; remove it")
        target = partial / name
        if target.is_file() and target.stat().st_size == size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.unfinished")
        store.get_file(prefix + name, str(unfinished))
        unfinished.rename(target)
