"""Disks that fail at any call, jobs killed after any call: what was there before is there, or the new one is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives.communicator import Communicator
from ddp.checkpoint import folder_lock
from ddp.checkpoint.store import Store
from ddp.errors import CheckpointError
from tests.ddp.checkpoint.stores import Disk, check, leftovers, put_disk, use_disk, write

GROWS = ("open", "mkdir", "write", "fsync", "close", "rename")  # what a full disk may refuse


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    put_disk(monkeypatch)
    monkeypatch.setattr(folder_lock, "_VISIBLE", 0.2)
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.5)


def attempt(folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, fake: Disk) -> list[str]:
    """Saves step 2 on a disk that fails, over what is there, and step 3 on one that is well again; the errors."""
    errors: list[str] = []

    def main(comm: Communicator) -> bool:
        store = Store(folder, comm, keep=2)
        comm.barrier()
        saved = True
        with monkeypatch.context() as patch:
            if comm.rank == 0:
                use_disk(patch, fake)
            comm.barrier()
            try:
                write(store, comm, 2)
            except CheckpointError as error:
                errors.append(str(error))
                saved = False
            comm.barrier()
        comm.barrier()
        check(store.newest(), 2 if saved else 1)
        if comm.rank == 0 and not saved:
            assert leftovers(folder) == []
        comm.barrier()
        write(store, comm, 3)
        check(store.newest(), 3)
        store.close()
        return saved

    # All of them, or none.
    assert len(set(collectives.run_threads(main, size=ranks))) == 1
    assert leftovers(folder) == []
    return errors


def with_step_1(folder: Path, ranks: int) -> None:
    def main(comm: Communicator) -> None:
        store = Store(folder, comm)
        write(store, comm, 0)
        write(store, comm, 1)
        store.close()

    collectives.run_threads(main, size=ranks)


def test_a_disk_that_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, ranks = errno.EIO, 2
    with_step_1(tmp_path / "before", ranks)
    failed, number, reached = 0, 0, True
    while reached:
        number += 1

        def before(at: int, name: str, number: int = number) -> None:
            if at == number:
                raise OSError(code, os.strerror(code))

        fake = Disk(before=before)
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        errors = attempt(folder, ranks, monkeypatch, fake)
        assert len(errors) in (0, ranks)
        assert all(os.strerror(code) in error and "rank " in error and str(folder) in error for error in errors)
        failed += bool(errors)
        reached = len(fake.calls) >= number
        shutil.rmtree(folder)
    assert number > 15
    # On the way to the disk it passes at the second attempt; a folder, a rename and an fsync of the whole do not.
    assert failed >= 3


def test_a_disk_that_is_full_from_some_call_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_step_1(tmp_path / "before", 2)
    outcomes, number = [], 0
    while not outcomes or outcomes[-1]:
        number += 1

        def before(at: int, name: str, number: int = number) -> None:
            if at >= number and name in GROWS:
                raise OSError(errno.ENOSPC, "full")

        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        errors = attempt(folder, 2, monkeypatch, Disk(before=before))
        assert all("No space left on device" in error and "free some room there" in error for error in errors)
        outcomes.append(bool(errors))
        shutil.rmtree(folder)
    assert len(outcomes) > 10  # the last is the first that did not reach its call before there was a checkpoint


def test_killed_after_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    with_step_1(runs, 2)
    states: list[Path] = []

    def after(number: int) -> None:
        states.append(tmp_path / f"{number}")
        shutil.copytree(runs, states[-1])

    def save(comm: Communicator) -> None:
        store = Store(runs, comm, keep=1)
        comm.barrier()
        if comm.rank == 0:
            put_disk(monkeypatch, after=after)
        comm.barrier()
        write(store, comm, 2)
        store.close()

    collectives.run_threads(save, size=2)
    monkeypatch.undo()
    found = []
    for state in states:

        def go_on(comm: Communicator, state: Path = state) -> int:
            store = Store(state, comm, keep=1)
            saved = store.newest()
            assert saved is not None
            check(saved, saved.step)
            write(store, comm, 3)
            check(store.newest(), 3)
            store.close()
            return saved.step

        found.append(collectives.run_threads(go_on, size=1)[0])
        assert [each.name for each in state.glob("step-*")] == ["step-0000000003"]
        assert leftovers(state) == []
    assert len(found) > 20
    assert found == sorted(found)  # never back to the old one once there was the new one
    assert set(found) == {1, 2}


def test_killed_for_good(tmp_path: Path, count: Callable[[int, int], int]) -> None:
    code = (
        "import sys, numpy as np, collectives; from ddp.checkpoint.store import Store\n"
        "store = Store(sys.argv[1], collectives.init('single')); saved = store.newest()\n"
        "step = 0 if saved is None else saved.step\n"
        "if saved is not None:\n"
        "    assert saved.state == step and all((each == step).all() for each in saved.read_all().values())\n"
        "while True:\n"
        "    print(step, flush=True)\n"
        "    step += 1; store.write(step, {'x': np.full(100_000, step), 'y': np.full(10, step)}, step, None)\n"
    )
    rng, saved = np.random.default_rng(0), 0
    for _ in range(count(2, 50)):
        args = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert int(process.stdout.readline()) >= saved
                saved = int(process.stdout.readline())
                time.sleep(rng.random() * 0.1)
            finally:
                process.kill()
    assert saved >= count(2, 50)


@pytest.mark.root
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this system lets not even root mount a small disk")
    big = {"x": np.ones(4_000_000, np.uint8)}

    def main(comm: Communicator) -> None:
        store = Store(tmp_path, comm)
        write(store, comm, 1)
        # When rank 1 has filled the disk first, rank 0 finds no room either.
        message = r"rank [01]: writing .*rank-000[01].*: No space left on device, [\d,]+ bytes are left"
        with pytest.raises(CheckpointError, match=message):
            store.write(2, big if comm.rank == 1 else {}, None, None)
        comm.barrier()
        check(store.newest(), 1)
        if comm.rank == 0:
            assert leftovers(tmp_path) == []
        write(store, comm, 2)
        check(store.newest(), 2)
        store.close()

    try:
        collectives.run_threads(main, size=2)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0: making the folder .*file/x: Not a directory"):
        Store(tmp_path / "file/x", collectives.init("single"))
    with pytest.raises(CheckpointError, match=r"File name too long \(give a shorter name\)"):
        Store(tmp_path / ("x" * 300), collectives.init("single"))


def test_a_folder_that_is_removed_between_saves(tmp_path: Path) -> None:
    folder = tmp_path / "runs"

    def main(comm: Communicator) -> None:
        store = Store(folder, comm)
        write(store, comm, 1)
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)
        comm.barrier()
        with pytest.raises(CheckpointError, match=r"rank 0: .*runs was removed while the job ran: make it again"):
            write(store, comm, 2)
        comm.barrier()
        if comm.rank == 0:
            folder.mkdir()
        comm.barrier()
        write(store, comm, 3)
        check(store.newest(), 3)
        store.close()

    collectives.run_threads(main, size=2)


# -- slow disks


def test_slower_than_a_collective_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(number: int, name: str) -> None:
        if name == "fsync":
            time.sleep(0.2)

    def main(comm: Communicator) -> None:
        comm.timeout = 0.3
        store = Store(tmp_path, comm)
        comm.barrier()
        if comm.rank == 0:
            put_disk(monkeypatch, before=slow)
        comm.barrier()
        start = time.monotonic()
        write(store, comm, 1)
        assert time.monotonic() - start > 1.0  # five times it is waited for the disk
        check(store.newest(), 1)

    collectives.run_threads(main, size=2)
