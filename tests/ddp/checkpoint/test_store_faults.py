"""Disks that fail at any call, jobs killed after any call: what was there before is there, or the new one is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize(("code", "ranks"), [(errno.EIO, 2), (errno.ENOSPC, 1)])
def test_a_disk_that_fails_once(code: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # An EIO on the way to the disk passes at the second attempt; a folder, a rename and an fsync of the whole do not.
    assert failed >= (3 if code == errno.EIO else 10)


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
    for _ in range(count(3, 50)):
        args = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert int(process.stdout.readline()) >= saved
                saved = int(process.stdout.readline())
                time.sleep(rng.random() * 0.1)
            finally:
                process.kill()
    assert saved >= count(3, 50)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of the size given, where the test may."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
        if done.returncode != 0:
            pytest.skip("this system lets not even root mount a small disk")
        mounted.append(folder)
        return folder

    if shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs `mount`")
    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
def test_a_disk_that_is_really_full(small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("3m")
    big = {"x": np.ones(4_000_000, np.uint8)}

    def main(comm: Communicator) -> None:
        store = Store(folder, comm)
        write(store, comm, 1)
        # Whoever comes first: when rank 1 has filled the disk, rank 0 finds no room either.
        message = r"rank [01]: writing .*rank-000[01].*: No space left on device, [\d,]+ bytes are left"
        with pytest.raises(CheckpointError, match=message):
            store.write(2, big if comm.rank == 1 else {}, None, None)
        comm.barrier()
        check(store.newest(), 1)
        if comm.rank == 0:
            assert leftovers(folder) == []
            (folder / "log").write_bytes(bytes(10_000))
        write(store, comm, 2)
        check(store.newest(), 2)
        store.close()

    collectives.run_threads(main, size=2)


@pytest.mark.root
def test_a_folder_that_can_only_be_read(small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("3m")
    comm = collectives.init("single")
    store = Store(folder, comm)
    write(store, comm, 1)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    message = r"disk cannot hold checkpoints: rank 0: locking .*: Read-only file system \(give a folder that can be"
    with pytest.raises(CheckpointError, match=message):
        Store(folder, comm)


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


def test_a_folder_that_is_removed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[bool] = []
    errors: list[str] = []
    while not outcomes or not outcomes[-1]:
        folder = tmp_path / str(len(outcomes))

        def before(at: int, name: str, number: int = len(outcomes) + 1, folder: Path = folder) -> None:
            if at == number:
                shutil.rmtree(folder)

        def main(comm: Communicator, folder: Path = folder, fake: Disk = Disk(before=before)) -> bool:  # noqa: B008
            store = Store(folder, comm)
            with monkeypatch.context() as patch:
                comm.barrier()
                if comm.rank == 0:
                    use_disk(patch, fake)
                comm.barrier()
                try:
                    write(store, comm, 1)
                except CheckpointError as error:
                    errors.append(str(error))
                    return False
                finally:
                    comm.barrier()
                    store.close()
            return True

        saved = collectives.run_threads(main, size=2)
        assert len(set(saved)) == 1
        outcomes.append(saved[0])
    assert len(outcomes) > 10  # the last is the first in which there was a checkpoint before the folder was removed
    assert all("No such file or directory (was the folder removed?)" in error for error in errors)


# -- slow disks

SLOW = """
import os, sys, time
import numpy as np
import collectives
from ddp.checkpoint import shard_file
from ddp.checkpoint.store import Store

class Slow:
    def __getattr__(self, name):
        return getattr(os, name)

    def fsync(self, fd):
        time.sleep(3.5)

comm = collectives.init(timeout=60).split(0, timeout=3.0)
if comm.rank == 1:
    shard_file.os = Slow()
store = Store(sys.argv[1], comm)
store.write(1, {f"x{comm.rank}": np.ones(3)}, None, None)
print("step", store.newest().step)
"""


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


@pytest.mark.mpi
def test_the_launcher_takes_a_slow_disk_for_no_hang(
    run_job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    launch = [sys.executable, "-m", "launcher", "-n", "2", "--hang-timeout", "3"]
    done = run_job([*launch, str(script), str(tmp_path / "runs")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1") == 2
