"""The MPI's own segment files: which are needless, and that none stays."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.backends.mpi.mpi_world import mapped_segment_files
from tests.conftest import Run, wait_until

LINE = "7f0000000000-7f0000200000 rw-s 00000000 00:19 {inode}                      {path}\n"


def test_only_segment_files_that_are_known_to_be_needless_are_found(tmp_path: Path) -> None:
    paths = ["/dev/shm/mpich_shm_8825fc3d_0", "/dev/shm/mpich_shm_8825fc3d_1 (deleted)", "/dev/shm/sm_segment.host.0.1"]
    paths += ["/dev/shm/psm2_shm.1", "/dev/shm/mine/mpich_shm_1", "/tmp/mpich_shm_2", "/dev/shm/my file"]
    lines = [LINE.format(inode=inode, path=path) for inode, path in enumerate(paths)]
    (tmp_path / "maps").write_text("7f0000000000-7f0000200000 rw-p 00000000 00:00 0\n" + "".join(lines))
    assert mapped_segment_files(tmp_path / "maps") == {(paths[0], "00:19", 0), (paths[2], "00:19", 2)}


HOLD = """
import os, re, sys, time
import numpy as np
import collectives
comm = collectives.init()
comm.all_reduce(np.ones(1))
files = re.findall(r"/dev/shm/(?:mpich_shm_|sm_segment)\\S+.*", open("/proc/self/maps").read())
with open(f"{sys.argv[1]}/{comm.rank}.new", "w") as file:
    file.write("\\n".join(files))
os.rename(file.name, f"{sys.argv[1]}/{comm.rank}")
time.sleep(60)
"""


LATER = """
import numpy as np
import collectives
comm = collectives.init()
from mpi4py import MPI
world = MPI.COMM_WORLD
for n in (1, 10_000, 1_000_000):
    x, y = np.full(n, float(world.rank)), np.empty(n)
    world.Allreduce(x, y)
    assert y[-1] == sum(range(world.size))
    world.Sendrecv(x, (world.rank + 1) % world.size, 0, y, (world.rank - 1) % world.size, 0)
    assert y[0] == (world.rank - 1) % world.size
made = [world.Dup(), world.Split(world.rank % 2, world.rank), world.Split_type(MPI.COMM_TYPE_SHARED)]
assert [each.allreduce(1) for each in made][0] == world.size
window = MPI.Win.Allocate_shared(1 << 16, 1, comm=world)
window.Fence()
one = MPI.Win.Allocate(1 << 16, 1, comm=world)
one.Lock_all(), one.Put(np.ones(100, "u1"), (world.rank + 1) % world.size), one.Flush_all(), one.Unlock_all()
world.Barrier()
window.Free(), one.Free()
comm.split(comm.rank % 2, 0).all_reduce(np.ones(3))
print("fine", flush=True)
"""


@pytest.mark.mpi
def test_when_everything_is_killed_no_segment_file_stays(start_job: Any, mpiexec: list[str], tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    job = start_job([*mpiexec, "-n", "2", sys.executable, str(tmp_path / "hold.py"), str(tmp_path)])
    told = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(path.exists() for path in told))
    files = {file for path in told for file in path.read_text().splitlines()}
    assert files, "the MPI has no segment file in /dev/shm: then this test says nothing"
    assert all(file.endswith(" (deleted)") for file in files), files
    assert not any(Path(file.removesuffix(" (deleted)")).exists() for file in files)
    for pid in job.pids():
        os.kill(pid, signal.SIGKILL)
    job.wait(10)


@pytest.mark.mpi
def test_what_comes_later_works_without_the_files(run_script: Run) -> None:
    done = run_script(LATER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2  # mpiexec may tear lines
    assert "mpich_shm" not in done.stderr
    assert "sm_segment" not in done.stderr
