"""Folders that hold anything: nothing outside of them changes, no call waits, and every error is one of ours."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import collectives
from collectives.communicator import Communicator
from ddp.checkpoint import folder_lock
from ddp.checkpoint.checkpoint_reader import find, open_checkpoint
from ddp.checkpoint.rank_group import RankGroup
from ddp.checkpoint.store import Store
from ddp.errors import CheckpointError
from tests.ddp.checkpoint.stores import check, write

MANIFEST, SHARD = "manifest.json", "rank-0000.safetensors"
# Where something else may stand: in a folder with the checkpoints of steps 1 and 2.
PLACES = (
    ".lock",
    ".step-0000000002.0123abcd.tmp",
    f".step-0000000009.deadbeef.tmp/{MANIFEST}",
    "step-0000000003",
    f"step-0000000003.3/{MANIFEST}",
    "step-0000000002",
    f"step-0000000002/{MANIFEST}",
    f"step-0000000002/{SHARD}",
    "step-0000000002/more",
)


def _link(to: str) -> Callable[[Path, Path], None]:
    return lambda path, outside: path.symlink_to(to.format(outside))


def _sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / MANIFEST).mkdir()
    (path / "x").write_text("x")


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link to a file": _link("{}/file"),
    "link to a folder": _link("{}/folder"),
    "link to a checkpoint": _link("{}/step-0000000002"),
    "link to its manifest": _link("{}/step-0000000002/" + MANIFEST),
    "link to a new file": _link("{}/new"),
    "link to itself": lambda path, outside: path.symlink_to(path.name),
    "link to zeros": _link("/dev/zero"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "empty file": lambda path, outside: path.touch(),
    "huge file": _sparse,
    "folder": _folder,
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_VISIBLE", 0.2)
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.2)


@pytest.fixture
def outside(folder: Path) -> Path:
    """Files that are not ours to change, beside the folder of checkpoints, with two checkpoints among them."""
    outside = folder / "outside"

    def main(comm: Communicator) -> None:
        store = Store(outside, comm)
        write(store, comm, 1)
        write(store, comm, 2)
        store.close()

    collectives.run_threads(main, size=1)
    (outside / ".lock").unlink()
    (outside / "file").write_text("precious\n")
    (outside / "folder").mkdir()
    for name in (MANIFEST, SHARD, "x", ".lock"):
        (outside / "folder" / name).write_text("precious\n")
    return outside


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(each): each.read_bytes() if each.is_file() else None for each in sorted(folder.rglob("*"))}


def put(runs: Path, outside: Path, place: str, kind: str) -> None:
    """Replaces what is at that place."""
    path = runs / place
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path, outside)


def prepared(folder: Path, outside: Path) -> Path:
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    shutil.copytree(outside, runs, ignore=lambda at, names: {"file", "folder"} if at == str(outside) else set())
    return runs


def use(runs: Path, what: Callable[[Store, Communicator], None]) -> str:
    """The error of that use of a store, or nothing. Any other exception than CheckpointError fails."""
    comm = collectives.init("single")
    try:
        store = Store(runs, comm, keep=1)
    except CheckpointError as error:
        return str(error)
    try:
        what(store, comm)
    except CheckpointError as error:
        return str(error)
    finally:
        store.close()
    return ""


@pytest.mark.parametrize("place", PLACES)
def test_anything_anywhere(place: str, folder: Path, outside: Path) -> None:
    before = content(outside)
    for kind in KINDS:
        runs = prepared(folder, outside)
        put(runs, outside, place, kind)
        seen = [None]
        error = use(runs, lambda store, comm: seen.append(store.newest()))  # noqa: B023  # called here
        result = seen[-1]
        if place != ".lock":
            assert (error, result is not None) == ("", True), kind
        elif kind.startswith("link") or kind in ("pipe", "folder"):
            assert re.search("locking .*/.lock: .* expected a regular file", error), (kind, error)
        if result is not None:
            check(result, result.step)
        with contextlib.suppress(CheckpointError):
            find(RankGroup(), runs)
        refused = use(runs, lambda store, comm: check(open_checkpoint(write(store, comm, 7)), 7))
        assert place == ".lock" or not refused, (kind, refused)
        assert content(outside) == before, kind
