"""Disks that fail at any call, jobs killed after any call: what was there before is there, or the new one is."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
    errors = []

    def main(comm: Communicator) -> bool:
        store = Store(folder, comm, keep=2)
        saved = True
        with monkeypatch.context() as patch:
            comm.barrier()
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


@pytest.mark.parametrize(("code", "for_good"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_a_disk_that_fails_at_any_call(
    code: int, for_good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Any
) -> None:
    """Once, or for everything that makes files grow from then on."""
    with_step_1(tmp_path / "before", 2)
    failures = 0
    for number in itertools.count(1, count(2, 1) if for_good else 1):

        def before(at: int, name: str, number: int = number) -> None:
            if at == number or (for_good and at > number and name in GROWS):
                raise OSError(code, os.strerror(code))

        fake = Disk(before=before)
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        errors = attempt(folder, 2, monkeypatch, fake)
        assert len(errors) in (0, 2)
        assert all(os.strerror(code) in error and "rank " in error and str(folder) in error for error in errors)
        failures += bool(errors)
        shutil.rmtree(folder)
        if len(fake.calls) < number or (for_good and not errors):
            break
    assert failures > 5


def test_killed_after_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    with_step_1(runs, 2)
    states = []

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
    results = []
    for state in states:
        single = collectives.init("single")
        store = Store(state, single, keep=1)
        saved = store.newest()
        check(saved, saved.step)
        results.append(saved.step)
        write(store, single, 3)
        check(store.newest(), 3)
        store.close()
        assert [each.name for each in state.glob("step-*")] == ["step-0000000003"]
        assert leftovers(state) == []
    assert len(results) > 20
    assert results == sorted(results)  # never back to the old one once there was the new one
    assert set(results) == {1, 2}


@pytest.mark.long
def test_killed_while_it_saves(tmp_path: Path) -> None:
    code = (
        "import sys, collectives; from ddp.checkpoint import Store; from tests.ddp.checkpoint.stores import *\n"
        "comm = collectives.init('single'); store = Store(sys.argv[1], comm); saved = store.newest()\n"
        "step = saved.step if saved else 0\n"
        "if saved: check(saved, step)\n"
        "while True: print(step, flush=True); step += 1; write(store, comm, step)\n"
    )
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(50):
        args = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert int(process.stdout.readline() or -1) >= reached
                reached = int(process.stdout.readline())
                time.sleep(rng.random() * 0.1)
            finally:
                process.kill()
    assert reached > 1


@pytest.mark.root
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("this system lets not even root mount a small disk")

    def main(comm: Communicator) -> None:
        store = Store(tmp_path, comm)
        write(store, comm, 1)
        big = {"x": np.ones(4_000_000, np.uint8)} if comm.rank == 1 else {}
        with pytest.raises(CheckpointError, match=r"rank [01]: writing .*rank-000[01].*: No space left on device"):
            store.write(2, big, None, None)
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


def test_a_folder_that_is_removed_between_saves(tmp_path: Path) -> None:
    comm = collectives.init("single")
    store = Store(tmp_path / "runs", comm)
    write(store, comm, 1)
    shutil.rmtree(store.folder)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved.* rank 0: reading .*/runs: No such file"):
        write(store, comm, 2)
    store.close()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0: making the folder .*file/x: Not a directory"):
        Store(tmp_path / "file/x", collectives.init("single"))
    with pytest.raises(CheckpointError, match=r"File name too long"):
        Store(tmp_path / ("x" * 300), collectives.init("single"))


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
