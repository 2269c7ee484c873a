"""Files at URLs, such as `s3://bucket/run`, through fsspec.

An object store has no renames and no locks. But it stores a file as a whole or not at all. The manifest is written
last, so a checkpoint exists once its manifest does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from ddp.errors import CheckpointError, how_to_install


def is_url(path: str) -> bool:
    """Whether a path is a URL, which fsspec opens: `is_url("s3://bucket/run")`."""
    return "://" in path


@contextlib.contextmanager
def _file_system(url: str) -> Iterator[tuple[Any, str]]:
    """Yields a URL's file system, and the path in it. Any error of its library in the block becomes an OSError.

    Raises: CheckpointError if fsspec does not know this kind of URL, or if fsspec, or its library for this file system,
    is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise CheckpointError(f"{url}: URLs go through fsspec, which is missing: {how_to_install('fsspec')}") from None
    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url}: {error}") from None
    try:
        system.invalidate_cache()  # other hosts write, too
        yield system, path
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def list_names(url: str) -> list[str]:
    """The names in a folder. Raises: OSError, or CheckpointError as `_file_system`; so do all functions below."""
    with _file_system(url) as (system, path):
        return [entry.rstrip("/").rpartition("/")[2] for entry in system.ls(path, detail=False)]


def exists(url: str) -> bool:
    """Whether there is a file or folder at this URL."""
    with _file_system(url) as (system, path):
        try:
            system.info(path)  # unlike `system.exists`, it raises for storage that cannot be reached
        except FileNotFoundError:
            return False
        return True


def make_folder(url: str) -> None:
    """Makes a folder, if the storage has folders."""
    with _file_system(url) as (system, path):
        system.makedirs(path, exist_ok=True)


def open_file(url: str) -> Any:
    """Opens a file for reading bytes."""
    with _file_system(url) as (system, path):
        return system.open(path, "rb")


def write_file(url: str, chunks: Iterable[memoryview]) -> int:
    """Writes a file and returns its length. An existing file is replaced."""
    with _file_system(url) as (system, path), system.open(path, "wb") as file:
        return sum(file.write(chunk) for chunk in chunks)


def remove_folder(url: str, first: str) -> None:
    """Removes a folder with its contents, if it exists. first: the name of the file that is removed first"""
    for target in (f"{url}/{first}", url):
        if exists(target):
            with _file_system(target) as (system, path):
                system.rm(path, recursive=True)
