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


@pytest.fixture
def path(folder: Path) -> Path:
    """A segment."""
    path = folder / "mpich_shm_1_0"
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def test_what_was_there_before_the_job_stays(folder: Path, path: Path) -> None:
    remove_stale_segments(time.time() + 1.0, str(folder))
    assert path.exists()


# What nobody uses goes, and what bears another name stays: doctor/test_machine.py.
@pytest.mark.parametrize("held", ["open", "mapped"])
def test_what_another_process_holds_stays(folder: Path, path: Path, held: str) -> None:
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
