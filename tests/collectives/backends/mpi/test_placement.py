"""What `init` makes of a rank's place on its node: cores, a GPU, the backend it was told, the MPI's own files."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import collectives
from collectives import cores
from collectives.backends.device import cuda
from collectives.backends.mpi.segment_files import SegmentFile, mapped, needless
from collectives.cores import Cores, share, threads, too_narrow
from collectives.start import asked_for
from tests.collectives.backends.device.machine import Machine
from tests.gpu.standin import Cupy


def bound(*masks: set[int], of: int = 8) -> list[Cores]:
    return [Cores(frozenset(mask), of) for mask in masks]


EIGHT = set(range(8))


@pytest.mark.parametrize(
    ("node", "shares"),
    [
        (bound(EIGHT), [8]),
        (bound(EIGHT, EIGHT), [4, 4]),
        (bound(EIGHT, EIGHT, EIGHT), [2, 2, 2]),
        (bound(*[set(range(49))] * 49), [1] * 49),  # 49 times 1/49 is less than 1 to a computer
        (bound(*[set(range(98))] * 49), [2] * 49),
        (bound({0, 1, 2, 3}, {4, 5, 6, 7}), [4, 4]),  # an engine has split them already
        (bound({0}, {0}), [1, 1]),
        (bound({0, 1, 2}, {2, 3}), [2, 1]),  # core 2 is half each one's
    ],
)
def test_a_core_is_split_among_the_ranks_that_may_run_on_it(node: list[Cores], shares: list[int]) -> None:
    assert [share(node, rank) for rank in range(len(node))] == shares


@pytest.mark.parametrize(
    ("node", "environ", "expected"),
    [
        (bound(EIGHT, EIGHT), {}, 4),
        (bound(EIGHT, EIGHT), {"OMP_NUM_THREADS": "8"}, None),
        (bound(EIGHT, EIGHT), {"MKL_NUM_THREADS": "1"}, None),
        (bound(EIGHT, EIGHT), {"OMP_NUM_THREADS": ""}, 4),
        (bound(EIGHT), {}, None),  # alone on its node: BLAS has found the cores by itself
        (bound({0, 1}, {2, 3}), {}, None),
    ],
)
def test_threads_are_limited_where_nobody_else_has(node: list[Cores], environ: dict[str, str], expected: Any) -> None:
    assert threads(node, 0, environ) == expected


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (bound(EIGHT, EIGHT), []),
        (bound({0}, {1}), [0, 1]),
        (bound({0, 1, 2, 3}, {4}), [1]),
        (bound({0}, {1}, of=3), []),  # an even split of three is one
        (bound({0}, of=8), [0]),  # one a node, and bound all the same
    ],
)
def test_who_is_bound_to_less_than_an_even_split(node: list[Cores], expected: list[int]) -> None:
    assert too_narrow(node) == expected


def test_a_node_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        cores.settle(bound({0}, {1}), rank, [0, 1], "openmpi")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


LINE = "7f0000000000-7f0000200000 rw-s 00000000 00:19 {inode}                      {path}\n"


def test_only_segment_files_that_are_known_to_be_needless_are_found() -> None:
    maps = "".join(
        LINE.format(inode=inode, path=path)
        for inode, path in enumerate(
            [
                "/dev/shm/mpich_shm_8825fc3d_0",
                "/dev/shm/mpich_shm_8825fc3d_1 (deleted)",
                "/dev/shm/sm_segment.host.0.12550001.0",
                "/dev/shm/psm2_shm.1",
                "/dev/shm/mine/mpich_shm_1",
                "/tmp/mpich_shm_2",
                "/dev/shm/my file",
            ]
        )
    )
    anonymous = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0\n"
    assert mapped(anonymous + maps) == {
        SegmentFile("/dev/shm/mpich_shm_8825fc3d_0", "00:19", 0),
        SegmentFile("/dev/shm/sm_segment.host.0.12550001.0", "00:19", 2),
    }


def test_a_file_that_one_rank_has_not_mapped_stays() -> None:
    one, two, elsewhere = SegmentFile("a", "00:19", 1), SegmentFile("b", "00:19", 2), SegmentFile("a", "00:20", 1)
    assert needless([{one, two}, {one}, {one, two}]) == {one}
    assert needless([{one}, {elsewhere}]) == frozenset()  # of the same name in another mount namespace
    assert needless([frozenset(), {one}]) == frozenset()


@pytest.mark.parametrize(
    ("backend", "environ", "expected"),
    [
        ("auto", {}, "auto"),
        ("auto", {"DDP_BACKEND": "nccl"}, "nccl"),
        ("auto", {"DDP_BACKEND": "auto"}, "auto"),
        ("mpi", {"DDP_BACKEND": "nccl"}, "mpi"),  # the script knows what it wants
    ],
)
def test_the_launchers_backend_fills_what_the_script_leaves_open(
    backend: str, environ: dict[str, str], expected: str
) -> None:
    assert asked_for(backend, environ) == expected


def test_a_wrong_backend_in_the_environment_is_named() -> None:
    with pytest.raises(collectives.BackendError, match=r"variable DDP_BACKEND should be one of auto, .*, is 'gloo'"):
        asked_for("auto", {"DDP_BACKEND": "gloo"})


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    """Four GPUs, and no rank has chosen one."""
    fake = Cupy(Machine(0), 4)
    monkeypatch.setattr(cuda, "_several", lambda: True)
    monkeypatch.setattr(cuda, "why_absent", lambda: None)
    monkeypatch.setattr(cuda, "load", lambda index=None: cuda.Cuda(fake, fake.local.device))
    fake.cuda.Device(0).use()
    return fake


@pytest.mark.parametrize(("local_rank", "device"), [(0, 0), (3, 3), (5, 1)])
def test_each_rank_of_a_node_takes_a_gpu(cupy: Cupy, local_rank: int, device: int) -> None:
    cuda.take_local_gpu(local_rank, {})
    assert cupy.local.device == device


@pytest.mark.parametrize("visible", ["2", "", "-1", "GPU-8f2a"])
def test_who_is_shown_one_gpu_keeps_it_and_cupy_is_not_asked(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setattr(cuda, "load", None)
    cuda.take_local_gpu(3, {"CUDA_VISIBLE_DEVICES": visible})


def test_who_has_chosen_a_gpu_keeps_it(cupy: Cupy) -> None:
    cupy.cuda.Device(2).use()
    cuda.take_local_gpu(3, {})
    assert cupy.local.device == 2


PROBE = """
import os, sys
import numpy as np
import collectives
before = "threadpoolctl" in __import__("sys").modules
comm = collectives.init()
imported = "threadpoolctl" in __import__("sys").modules and not before
import threadpoolctl
threads = {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}
with open(f"{sys.argv[1]}/{comm.rank}", "w") as file:  # an engine would tear lines
    file.write(f"{sorted(threads)} {os.environ.get('OMP_NUM_THREADS')} {imported}")
"""


@pytest.mark.mpi
def test_ranks_that_no_launcher_started_share_the_cores(run_job: Any, mpiexec: list[str], tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    cpus = len(os.sched_getaffinity(0))
    if cpus < 2:
        pytest.skip("one core cannot be shared out")

    def threads(*options: str, **env: str) -> list[str]:
        start = [*mpiexec, *options, "-n", "2", sys.executable, str(tmp_path / "probe.py"), str(tmp_path)]
        done = run_job(start, timeout=30, env={**dict.fromkeys(cores._VARIABLES, ""), **env})
        assert done.returncode == 0, done.stderr
        return [(tmp_path / str(rank)).read_text() for rank in range(2)]

    unbound = threads("--bind-to", "none", OMPI_MCA_hwloc_base_binding_policy="none")
    assert unbound == [f"[{cpus // 2}] {cpus // 2} True"] * 2
    assert threads(OMP_NUM_THREADS="1") == ["[1] 1 False"] * 2


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
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in told):
        assert time.monotonic() < deadline, "the ranks did not come up"
        time.sleep(0.02)
    files = {file for path in told for file in path.read_text().splitlines()}
    assert files, "the MPI has no segment file in /dev/shm: then this test says nothing"
    assert all(file.endswith(" (deleted)") for file in files), files
    assert not any(Path(file.removesuffix(" (deleted)")).exists() for file in files)
    for pid in job.pids():
        os.kill(pid, signal.SIGKILL)
    job.wait(10)


@pytest.mark.mpi
def test_what_comes_later_works_without_the_files(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_script(LATER, 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 3  # mpiexec may tear lines
    assert "mpich_shm" not in done.stderr
    assert "sm_segment" not in done.stderr


def test_a_cupy_that_does_not_work_is_no_error_of_init(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int | None = None) -> Any:
        raise collectives.BackendError("no kernel image")

    monkeypatch.setattr(cuda, "load", broken)
    cuda.take_local_gpu(1, {})
