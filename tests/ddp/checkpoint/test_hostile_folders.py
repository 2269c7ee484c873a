"""Folders that hold anything: nothing outside of them changes, no call waits, and every error is one of ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives.communicator import Communicator
from ddp.checkpoint import folder_lock
from ddp.checkpoint.agreement import Agreement
from ddp.checkpoint.saved import Saved, find, open_checkpoint
from ddp.checkpoint.store import Store
from ddp.errors import CheckpointError
from tests.ddp.checkpoint.stores import check, write

MANIFEST, SHARD = "manifest.json", "rank-0000.safetensors"
# Where something else may stand: in a folder with the checkpoints of steps 1 and 2.
PLACES = (
    ".lock",
    ".step-0000000002.0123abcd.tmp",
    ".step-0000000003.2.deadbeef.tmp",
    f".step-0000000009.deadbeef.tmp/{MANIFEST}",
    "step-0000000003",
    "step-0000000002.2",
    f"step-0000000003.3/{MANIFEST}",
    "step-0000000002",
    f"step-0000000002/{MANIFEST}",
    f"step-0000000002/{SHARD}",
    "step-0000000002/more",
    f"step-0000000001/{MANIFEST}",
    f"step-0000000001/{SHARD}",
    "notes",
)


def _link(to: str) -> Callable[[Path, Path], None]:
    return lambda path, outside: path.symlink_to(to.format(outside))


def _socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / MANIFEST).mkdir()
    (path / "x").write_text("x")


def _closed(path: Path, outside: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def _closed_folder(path: Path, outside: Path) -> None:
    path.mkdir()
    path.chmod(0)


# What stands there. Only the last two are unreadable, and to root they are not.
REQUEST_KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link to a file": _link("{}/file"),
    "link to a folder": _link("{}/folder"),
    "link to a checkpoint": _link("{}/step-0000000002"),
    "link to its manifest": _link("{}/step-0000000002/" + MANIFEST),
    "link to a new file": _link("{}/new"),
    "link to itself": lambda path, outside: path.symlink_to(path.name),
    "link to the parent": _link(".."),
    "link to zeros": _link("/dev/zero"),
    "link to nothing": _link("/dev/null"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": _socket,
    "empty file": lambda path, outside: path.touch(),
    "text": lambda path, outside: path.write_text("text\n") and None,
    "huge file": _sparse,
    "folder": _folder,
    "closed file": _closed,
    "closed folder": _closed_folder,
}
UNREADABLE = ("closed file", "closed folder")


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
    """Replaces what is at that place; does nothing where a folder is needed and something else is there."""
    path = runs / place
    if not os.path.lexists(path.parent):
        path.parent.mkdir()
    if path.parent.is_symlink() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        path.chmod(0o700)
        shutil.rmtree(path)
    REQUEST_KINDS[kind](path, outside)


def prepared(folder: Path, outside: Path) -> Path:
    runs = folder / "runs"
    for at, folders, _ in os.walk(runs):
        for each in folders:
            if not os.path.islink(os.path.join(at, each)):
                os.chmod(os.path.join(at, each), 0o700)
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


def newest(runs: Path) -> tuple[Saved | None, str]:
    found: list[Saved | None] = []

    def look(store: Store, comm: Communicator) -> None:
        found.append(store.newest())

    error = use(runs, look)
    return (found[0] if found else None), error


def test_anything_anywhere(folder: Path, outside: Path, count: Callable[[int, int], int]) -> None:
    before = content(outside)
    errors = 0
    for seed in range(count(200, 20_000)):
        rng = np.random.default_rng(seed)
        runs = prepared(folder, outside)
        done = [(str(rng.choice(PLACES)), str(rng.choice(list(REQUEST_KINDS)))) for _ in range(rng.integers(1, 5))]
        for place, kind in done:
            put(runs, outside, place, kind)
        readable = not any(kind in UNREADABLE for _, kind in done)
        locked = readable and not any(place == ".lock" for place, kind in done if kind not in ("empty file", "text"))
        whole = [step for step in (2, 1) if not any(place.startswith(f"step-000000000{step}") for place, _ in done)]
        found, error = newest(runs)
        if found is not None:
            check(found, found.step)
        if locked and whole:
            assert (error, found is not None) == ("", True), done
            assert found is not None
            assert found.step >= whole[0], done
        with contextlib.suppress(CheckpointError):
            find(Agreement(), runs)
        refused = use(runs, lambda store, comm: check(open_checkpoint(write(store, comm, 7)), 7))
        assert not (locked and refused), (done, refused)
        assert content(outside) == before, done
        errors += bool(error)
    assert errors > 10  # or the places are none


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("link to a file", "locking .*/.lock: it is a symbolic link, expected a regular file"),
        ("pipe", "it is a named pipe, expected a regular file"),
    ],
)
def test_a_lock_is_a_file(kind: str, message: str, folder: Path, outside: Path) -> None:
    runs, before = prepared(folder, outside), content(outside)
    put(runs, outside, ".lock", kind)
    with pytest.raises(CheckpointError, match=message):
        Store(runs, collectives.init("single"))
    assert content(outside) == before


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (MANIFEST, "pipe", f"{MANIFEST}: it is a named pipe, expected a regular file"),
        (MANIFEST, "link to zeros", f"{MANIFEST}: it is a device, expected a regular file"),
        (MANIFEST, "huge file", f"{MANIFEST}: it has 4,398,046,511,104 bytes, and 1,073,741,824 are the most"),
        (SHARD, "folder", f"{SHARD}: it is a directory, expected a regular file"),
    ],
)
def test_the_checkpoint_before_is_taken(
    name: str, kind: str, message: str, folder: Path, outside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = prepared(folder, outside)
    put(runs, outside, f"step-0000000002/{name}", kind)
    found, error = newest(runs)
    assert error == ""
    check(found, 1)
    assert message in caplog.text
