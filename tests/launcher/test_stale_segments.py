"""What a killed MPI left in shared memory is removed if nobody uses it, and only then."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.linux import remove_stale_segments


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the file system that is meant."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def segment(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def test_what_nobody_uses_goes_and_what_bears_another_name_stays(folder: Path) -> None:
    old = segment(folder, "mpich_shm_1_0")
    remove_stale_segments(time.time() + 1.0, str(folder))
    assert old.exists()  # it was there before the job
    start = time.time()
    gone = [segment(folder, name) for name in ("mpich_shm_8825fc3d_0", "sm_segment.host.0.12550001.1")]
    mine = segment(folder, "my_own_data")
    remove_stale_segments(start, str(folder))
    assert not any(path.exists() for path in gone)
    assert mine.exists()


@pytest.mark.parametrize("held", ["open", "mapped"])
def test_what_another_process_holds_stays(folder: Path, held: str) -> None:
    path = segment(folder, "mpich_shm_1_0")
    code = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "if sys.argv[2] == 'mapped': memory = mmap.mmap(fd, 0); os.close(fd)\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(path), held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        remove_stale_segments(0.0, str(folder))
        assert path.exists()
        holder.stdin.close()
        holder.wait(10)
    remove_stale_segments(0.0, str(folder))
    assert not path.exists()
