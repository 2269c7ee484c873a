"""What a launcher costs beside the work: ddp-launch, bare mpiexec and torchrun side by side, two ranks on this machine.

    python -m benchmarks.startup [--rounds 10] [--only first,exit] [--json FILE]

first     from the shell to the first all-reduce's result on the last rank
whole     from the shell to the end of a job that does one all-reduce
exit      from one rank's exit with code 1 to the end of every process; the other rank is in an all-reduce
killed    the same, when it was killed by SIGKILL
restart   from a rank's exit with code 1 to the first all-reduce of the next attempt
memory    proportional set size of all that is no rank (launcher, agents, engine), in MiB a rank

A ratio is to the better of torchrun's two ways to start, round by round. Without PyTorch torchrun is left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import harness

# What a rank does, by the first argument; it writes moments into the folder that the second names. The monotonic clock
# is the machine's, so that they may be compared.
RANK = """
import os, signal, sys, time
matter, folder = sys.argv[1:]

def note(name, rank, what):
    with open(f"{folder}/{name}.{rank}.new", "w") as file:
        file.write(str(what))
    os.rename(file.name, f"{folder}/{name}.{rank}")

rank, attempt, reduce = start()
reduce()
note(f"first{attempt}", rank, time.monotonic())
note("pid", rank, os.getpid())
if matter == "memory":
    while not os.path.exists(f"{folder}/enough"):
        time.sleep(0.01)
elif matter in ("exit", "killed", "restart") and attempt == 0:
    reduce()
    if rank == 1:
        time.sleep(0.3)  # until all is quiet
        note("failed", rank, time.monotonic())
        if matter == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    while True:
        reduce()
"""

OURS = """
import numpy as np
import collectives

def start():
    import os
    comm = collectives.init()
    return comm.rank, int(os.environ.get("DDP_ATTEMPT", 0)), lambda: comm.all_reduce(np.ones(1))
"""

BARE = """
import numpy as np
from mpi4py import MPI

def start():
    world, total = MPI.COMM_WORLD, np.zeros(1)
    return world.rank, 0, lambda: world.Allreduce(np.ones(1), total)
"""

TORCH = """
import torch
import torch.distributed as dist

def start():
    import atexit, os
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    return dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), lambda: dist.all_reduce(torch.ones(1))
"""

N = 2
LIMIT = 20.0  # s a run; a restarted torchrun may wait for ranks of before without end
TRIES = 4  # of torchrun, which may fail by itself
GOAL = 0.2  # of torchrun's
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# An installed package has its bytecode; a checkout has it from its second start on, unless Python may not write it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | AS_ROOT
MARK = "DDP_BENCHMARK_JOB"
MATTERS = ("first", "whole", "exit", "killed", "restart", "memory")


def implementations(folder: Path) -> dict[str, list[str]]:
    """Name → command, to which the matter and a folder are added. The scripts are written into `folder`."""
    for name, text in {"ours": OURS, "bare": BARE, "gloo": TORCH}.items():
        (folder / f"{name}.py").write_text(text + RANK)
    bin = Path(sys.executable).parent
    mpiexec = [str(bin / "mpiexec"), "-n", str(N), sys.executable]
    commands = {
        "ddp-launch": [sys.executable, "-m", "launcher", "-n", str(N), "{restarts}", str(folder / "ours.py")],
        "mpiexec + collectives": [*mpiexec, str(folder / "ours.py")],
        "mpiexec + mpi4py": [*mpiexec, str(folder / "bare.py")],
    }
    if (bin / "torchrun").exists():
        torchrun = [str(bin / "torchrun"), f"--nproc-per-node={N}", "{restarts}"]
        commands["torchrun"] = [*torchrun, str(folder / "gloo.py")]
        commands["torchrun --standalone"] = [*torchrun, "--standalone", str(folder / "gloo.py")]
    return commands


def enters(name: str, matter: str) -> bool:
    """False if it cannot do what is measured: mpiexec restarts nothing, bare mpi4py hangs when a rank dies."""
    if name == "mpiexec + mpi4py":
        return matter in ("first", "whole", "memory")
    return name != "mpiexec + collectives" or matter != "restart"


def measure(command: Sequence[str], matter: str) -> float:
    """Seconds, or MiB. Raises: SystemExit with its output, if the job does not end as it should or in time."""
    restarts = ["--max-restarts=1"] if matter == "restart" else []
    words = [word for each in command for word in (restarts if each == "{restarts}" else [each])]
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as output:
        folder = Path(name)
        start, found = time.monotonic(), 0.0
        job = subprocess.Popen(
            [*words, matter, name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**ENVIRONMENT, MARK: mark},
            cwd=harness.ROOT,
        )
        try:
            if matter == "memory":
                wait_for(lambda: all((folder / f"pid.{rank}").exists() for rank in range(N)), job)
                ranks = {int((folder / f"pid.{rank}").read_text()) for rank in range(N)}
                found = sum(pss(pid) for pid in processes(mark) if pid not in ranks) / N
                (folder / "enough").touch()
            code = job.wait(LIMIT)
            if matter in ("exit", "killed"):
                wait_for(lambda: not processes(mark))
            end = time.monotonic()
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill(mark)
            job.wait()
        struck = matter not in ("exit", "killed", "restart") or (folder / "failed.1").exists()
        if code is None or not struck or (code != 0) != (matter in ("exit", "killed")):
            output.seek(0)
            raise SystemExit(f"{matter}: {' '.join(words)} ended with {code}:\n{output.read()}")
        if matter == "memory":
            return found
        if matter == "first":
            return latest(folder, "first0") - start
        if matter == "restart":
            return latest(folder, "first1") - latest(folder, "failed")
        return end - (start if matter == "whole" else latest(folder, "failed"))


def insist(name: str, command: Sequence[str], matter: str) -> float:
    """What `measure` returns. A restarted torchrun may fail on the addresses of its ranks of before: after some tries
    it took infinitely long."""
    for _ in range(TRIES):
        try:
            return measure(command, matter)
        except SystemExit as failure:
            if not name.startswith("torchrun"):
                raise
            print(f"{name} is started again: {str(failure).splitlines()[0]}", flush=True)
    return math.inf


def latest(folder: Path, name: str) -> float:
    """The last of the moments that ranks have noted under a name."""
    return max(float(path.read_text()) for path in folder.glob(f"{name}.[0-9]"))


def wait_for(ready: Callable[[], bool], job: subprocess.Popen[bytes] | None = None) -> None:
    """Waits, polling every millisecond. Raises: TimeoutExpired if it takes too long or the job ends before."""
    deadline = time.monotonic() + LIMIT
    while not ready():
        if time.monotonic() > deadline or (job is not None and job.poll() is not None):
            raise subprocess.TimeoutExpired("waiting", LIMIT)
        time.sleep(0.001)


def processes(mark: str) -> list[int]:
    """The living processes of one job."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if needle in (entry / "environ").read_bytes():  # a zombie has none
                    found.append(int(entry.name))
    return found


def kill(mark: str) -> None:
    """Ends whatever is left of a job that failed."""
    for _ in range(50):
        left = processes(mark)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        time.sleep(0.01)


def pss(pid: int) -> float:
    """Proportional set size in MiB: pages shared by n processes count 1/n in each."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def ratio(rounds: Mapping[str, Sequence[float]], name: str) -> float | None:
    """The median of the rounds' ratios of an implementation to the better torchrun; None without one.

    >>> ratio({"ours": [1.0, 1.0, 4.0], "torchrun": [5.0, 9.0, 10.0], "torchrun --standalone": [9.0, 8.0, 9.0]}, "ours")
    0.2
    """
    others = [taken for other, taken in rounds.items() if other.startswith("torchrun")]
    if not others or math.isinf(statistics.median(rounds[name])):
        return None
    return statistics.median(mine / min(theirs) for mine, *theirs in zip(rounds[name], *others, strict=True))


def main() -> None:
    args = harness.parser(__doc__, rounds=10, only=MATTERS).parse_args()
    found: dict[str, harness.Rounds] = {matter: {} for matter in args.only}
    with tempfile.TemporaryDirectory() as folder:
        commands = implementations(Path(folder))
        for number in range(args.rounds + 1):  # the first does not count
            for matter in args.only:
                names = [name for name in commands if enters(name, matter)]
                calls = {name: lambda n=name, m=matter: insist(n, commands[n], m) for name in names}
                harness.take_turns(calls, min(number, 1), warmup=int(number == 0), keep=found[matter])
    goals = []
    for matter, rounds in found.items():
        print(f"\n{matter + (', MiB a rank' if matter == 'memory' else ', s'):<24} {'median':>9} {'min':>9} {'max':>9}")
        for name, taken in rounds.items():
            print(f"{name:<24} {harness.spread(taken, 9)}")
        if matter not in ("whole", "memory"):
            goals.append(harness.at_most(f"{matter}: ddp-launch / torchrun", GOAL, ratio(rounds, "ddp-launch")))
    # JSON has no infinity.
    plain = {
        matter: {name: [each if math.isfinite(each) else None for each in taken] for name, taken in rounds.items()}
        for matter, rounds in found.items()
    }
    harness.write(args.json, "startup", goals, ranks=N, rounds=plain)


if __name__ == "__main__":
    main()
