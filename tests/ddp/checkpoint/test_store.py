"""The store among ranks: what one world writes another reads, one job has a folder, and no rank saves alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.communicator import Communicator
from collectives.errors import PeerLeft
from ddp.checkpoint import checkpoint_files, checkpoint_reader, folder_lock, rank_group
from ddp.checkpoint.checkpoint_reader import find, open_checkpoint
from ddp.checkpoint.store import Store
from ddp.errors import CheckpointError
from tests.ddp.checkpoint.stores import arrays, check, leftovers, put_disk, same, write


@pytest.mark.parametrize(
    ("folder", "ranks"),
    [
        ("{}/a/b", 1),
        ("{}/a/b", 2),
        ("{}/a/b", 5),
        ("memory:/{}/a/b", 1),
        ("file://{}/a/b", 1),
        ("local://{}/a/b", 3),
    ],
    ids=["1 rank", "2 ranks", "5 ranks", "memory", "file", "local"],
)
def test_what_was_written_is_read(folder: str, ranks: int, tmp_path: Path) -> None:
    folder = folder.format(tmp_path)
    if "://" in folder:
        pytest.importorskip("fsspec")

    def main(comm: Communicator) -> None:
        store = Store(folder, comm, keep=2)
        assert store.newest() is None
        for step, name in ((3, "3"), (4, "4"), (5, "5"), (4, "4.2")):
            assert str(write(store, comm, step)) == f"{folder}/step-000000000{name}"
        saved = store.newest()
        check(saved, 4)
        assert (saved.size, str(saved.path)) == (ranks, f"{folder}/step-0000000004.2")
        check(store.find(f"{folder}/step-0000000005"), 5)
        with pytest.raises(CheckpointError, match=r"no checkpoint in|No such file"):
            store.find(f"{folder}/step-0000000003")
        store.close()

    collectives.run_threads(main, size=ranks)
    if "memory" in folder:
        return
    files = {each.name for each in (tmp_path / "a/b/step-0000000005").iterdir()}
    assert files == {"manifest.json", *(f"rank-000{rank}.safetensors" for rank in range(ranks))}
    assert leftovers(tmp_path / "a/b") == []


def test_parts_of_it_are_read_without_a_communicator(tmp_path: Path) -> None:
    def main(comm: Communicator) -> Path:
        return write(Store(tmp_path, comm), comm, 1)

    saved = open_checkpoint(collectives.run_threads(main, size=3)[0])
    saved.verify()
    expected = arrays(1)
    assert saved.names == {name: (array.dtype, array.shape) for name, array in expected.items()}
    same({"rng": saved.read("rng")}, {"rng": expected["rng"]})
    same(saved.read_all("model."), {name: array for name, array in expected.items() if name.startswith("model.")})
    assert saved.read("rng").flags.writeable
    with pytest.raises(KeyError, match="nothing"):
        saved.read("nothing")
    moved = tmp_path / "best"
    os.rename(saved.path, moved)
    same(open_checkpoint(moved).read_all(), expected)


def test_large_ones_are_read_under_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"x": np.zeros(3_000_000, np.uint8), "y": np.zeros(5)}
    Store(tmp_path, collectives.init("single")).write(1, given, None, None)
    bar = checkpoint_reader.progress_bar
    monkeypatch.setattr(
        checkpoint_reader, "progress_bar", lambda **options: bar(**{**options, "delay": 0, "leave": True})
    )
    for large, names in ((1 << 28, []), (1 << 20, ["verifying", "reading"])):
        monkeypatch.setattr(checkpoint_reader, "_LARGE", large)
        result = find(rank_group.RankGroup(), tmp_path)
        result.read_all()
        lines = capsys.readouterr().err.splitlines()
        assert [line.split()[0] for line in lines] == names
        assert all("step-0000000001: 100%|" in line and "| 3.00M/3.00M [" in line for line in lines)


def test_pytorchs_reader_reads_a_shard(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    given = {"x": np.arange(6.0).reshape(2, 3)}
    path = Store(tmp_path, collectives.init("single")).write(1, given, None, None)
    same(numpy.load_file(path / "rank-0000.safetensors"), given)


def test_arrays_of_any_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_CHUNK", 1024), ("_SMALL", 512)):
        monkeypatch.setattr(checkpoint_files, name, value)
    base = np.arange(3 * 50 * 7, dtype=np.float64).reshape(3, 50, 7)
    given = {"t": base.T, "s": base[:, ::-3], "f": np.asfortranarray(base), "r": base.view(), "0": base[0, 0, 0:0]}
    given["r"].flags.writeable = False
    saved = open_checkpoint(Store(tmp_path, collectives.init("single")).write(1, given, None, None))
    same(saved.read_all(), given)
    saved.verify()


class SlowChecksum:
    """SHA-256 on a processor that has other work: chunks are written before their checksums are computed."""

    def __init__(self, data: bytes = b"") -> None:
        self.digest = hashlib.sha256(data)

    def update(self, data: memoryview) -> None:
        time.sleep(0.01)
        self.digest.update(data)

    def hexdigest(self) -> str:
        return self.digest.hexdigest()


def test_neither_side_holds_the_data_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = np.zeros(24_000_000, np.uint8)
    monkeypatch.setattr(checkpoint_files, "hashlib", SimpleNamespace(sha256=SlowChecksum))
    store = Store(tmp_path, collectives.init("single"))
    tracemalloc.start()
    try:
        path = store.write(1, {"x": big, "t": big.reshape(6000, -1).T}, None, None)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
        tracemalloc.reset_peak()
        assert open_checkpoint(path).read("x").nbytes == big.nbytes
        assert tracemalloc.get_traced_memory()[1] < big.nbytes + 16_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("keep", "steps", "newest", "left"),
    [
        (2, [1, 2, 3, 5, 8], 8, ["0005", "0008"]),
        (None, [9, 10, 11], 11, ["0009", "0010", "0011"]),
        (3, [100, 200, 300, 150], 150, ["0150.2", "0200", "0300"]),
        (3, [100, 200, 300, 150, 200, 200], 200, ["0150.2", "0200.2", "0200.3"]),
    ],
    ids=["2", "all", "a run that went back", "and came there again"],
)
def test_as_many_are_kept_as_was_asked(
    keep: int | None, steps: list[int], newest: int, left: list[str], tmp_path: Path
) -> None:
    def main(comm: Communicator) -> None:
        store = Store(tmp_path, comm, keep=keep)
        for step in steps:
            write(store, comm, step)
        check(store.newest(), newest)

    collectives.run_threads(main, size=2)
    assert [each.name[11:] for each in sorted(tmp_path.glob("step-*"))] == left


# -- all ranks or none


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda rank: (1 + rank, {}, None, None), r"ranks are at different steps: \[1, 2, 3\]"),
        (lambda rank: (1, {"x": np.zeros(3)}, None, None), "x: element 0 is written by several ranks"),
        (lambda rank: (1, {}, None, {1} if rank == 1 else 3), "rank 1: own_state: Object of type set is not JSON"),
        (lambda rank: (1, {}, {1} if rank == 0 else 3, None), "rank 0: state: Object of type set is not JSON"),
    ],
)
def test_what_one_rank_cannot_write_none_does(what: Any, message: str, tmp_path: Path) -> None:
    def main(comm: Communicator) -> None:
        store = Store(tmp_path, comm)
        with pytest.raises(CheckpointError, match=message):
            store.write(*what(comm.rank))
        if comm.rank == 0:
            assert leftovers(tmp_path) == []
        assert store.newest() is None
        write(store, comm, 1)

    collectives.run_threads(main, size=3)


@pytest.mark.parametrize(
    ("error", "own", "said"),
    [
        (MemoryError("none left"), CheckpointError, "step 7 was not saved, those before are as they were: rank 1: Mem"),
        (KeyboardInterrupt(), KeyboardInterrupt, "rank 1 was interrupted|^$"),
    ],
    ids=["error", "Ctrl-C"],
)
def test_a_rank_that_cannot_even_begin(
    error: BaseException, own: type[BaseException], said: str, tmp_path: Path
) -> None:
    def main(comm: Communicator) -> None:
        store = Store(tmp_path, comm)

        def ready() -> bool:
            if comm.rank == 1:
                raise error
            return True

        with pytest.raises(own if comm.rank == 1 else CheckpointError, match=said):
            write(store, comm, 7, ready=ready)
        if comm.rank == 0:
            assert leftovers(store.folder) == []
        assert write(store, comm, 7, ready=lambda: comm.rank != 2) is None
        assert store.newest() is None
        write(store, comm, 7)
        check(store.newest(), 7)

    collectives.run_threads(main, size=3)


def test_a_rank_that_is_gone(tmp_path: Path) -> None:
    def main(comm: Communicator) -> None:
        store = Store(tmp_path, comm)
        if comm.rank == 0:
            with pytest.raises(PeerLeft, match="rank 1 has left"):
                write(store, comm, 1)

    collectives.run_threads(main, size=2)
    assert leftovers(tmp_path) == []


def test_a_disk_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "PATIENCE", 0.3)
    answer = threading.Event()

    def main(comm: Communicator) -> None:
        comm.timeout = 0.2  # every beat is short, then
        store = Store(tmp_path, comm)
        comm.barrier()
        if comm.rank == 0:
            put_disk(monkeypatch, before=lambda number, name: answer.wait() if name == "fsync" else None)
        comm.barrier()
        with pytest.raises(CheckpointError, match=r"made no progress for 0\.3 s"):
            write(store, comm, 1)
        with pytest.raises(CheckpointError, match="in an earlier save"):
            write(store, comm, 2)

    timer = threading.Timer(1.5, answer.set)
    timer.start()
    collectives.run_threads(main, size=2)
    timer.join()


# -- one folder, one job

TAKE = (
    "import os, sys, time; from ddp.checkpoint import folder_lock as f; lock = f.FolderLock(sys.argv[1]); lock.take()"
)


def test_another_folder_on_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_VISIBLE", 0.1)

    def main(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match=r"rank 1: .* is not the folder that rank 0 has .*; rank 2 too"):
            Store(tmp_path / ("a" if comm.rank == 0 else "b"), comm)

    collectives.run_threads(main, size=3)
    Store(tmp_path / "a", collectives.init("single"))  # nobody has it


@pytest.mark.parametrize(
    "more",
    ["", "\nif os.fork():\n    os.kill(os.getpid(), 9)"],
    ids=["its process", "its process, though a forked child lives"],
)
def test_the_lock_is_gone_with(more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"{TAKE}{more}\nprint('taken', flush=True); time.sleep(60)"
    args = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == "taken\n"
            if not more:
                monkeypatch.setattr(folder_lock, "_PATIENCE", 0.0)
                with pytest.raises(CheckpointError, match=f"by process {process.pid} on"):
                    Store(tmp_path, collectives.init("single"))
                process.kill()
            monkeypatch.setattr(folder_lock, "_PATIENCE", 20.0)
            store = Store(tmp_path, collectives.init("single"))
            store.close()
            for call in (lambda: store.write(1, {}, None, None), store.newest, store.newest_step):
                with pytest.raises(CheckpointError, match="the Store was closed: make another one"):
                    call()
        finally:
            os.killpg(process.pid, 9)


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", flock)
    others = tmp_path / ".step-0000000002.0123abcd.tmp"
    others.mkdir()
    store = Store(tmp_path, collectives.init("single"))
    write(store, collectives.init("single"), 1)
    check(store.newest(), 1)
    assert others.exists()  # another job may be writing it
    assert "its file system has no locks" in caplog.text
