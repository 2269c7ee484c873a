"""What a launcher costs beside the work: ddp-launch, bare mpiexec and torchrun side by side, two ranks on this machine.

    python -m benchmarks.startup [--rounds 10] [--only first,exit] [--json FILE]

first     s from the shell to the first all-reduce's result on the last rank
exit      s from one rank's exit with code 1 to the end of every process; the other rank is in an all-reduce
killed    s from the SIGKILL of one rank to the end of every process
restart   s from a rank's exit with code 1 to the first all-reduce of the next attempt
memory    proportional set size of all other processes than ranks (launcher, agents, engine), in MiB per rank

Without PyTorch torchrun is left out. If a run of torchrun does not end as it should, it is tried again; if all fail, it
counts as the limit of 20 s.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import harness
from benchmarks.jobs import marked_job, processes, wait_until

RANK = str(harness.ROOT / "benchmarks" / "startup_rank.py")
N = 2
LIMIT = 20.0  # s a run; a restarted torchrun may wait for ranks of before without end
TRIES = 4  # of torchrun
GOAL = 0.2  # of torchrun's
MATTERS = ("first", "exit", "killed", "restart", "memory")
# What mpiexec cannot do: it restarts nothing, and bare mpi4py hangs when a rank dies.
LACKS = {"mpiexec + collectives": ("restart",), "mpiexec + mpi4py": ("exit", "killed", "restart")}


def implementations(matter: str) -> dict[str, list[str]]:
    """Name → command, to which the matter and a folder are added."""
    bin = Path(sys.executable).parent
    restarts = ["--max-restarts=1"] if matter == "restart" else []
    mpiexec = [str(bin / "mpiexec"), "-n", str(N), sys.executable]
    torchrun = [str(bin / "torchrun"), f"--nproc-per-node={N}", *restarts]
    commands = {
        "ddp-launch": [sys.executable, "-m", "launcher", "-n", str(N), *restarts, RANK, "collectives"],
        "mpiexec + collectives": [*mpiexec, RANK, "collectives"],
        "mpiexec + mpi4py": [*mpiexec, RANK, "mpi4py"],
        "torchrun": [*torchrun, RANK, "torch"],
        "torchrun --standalone": [*torchrun, "--standalone", RANK, "torch"],
    }
    able = {name: command for name, command in commands.items() if matter not in LACKS.get(name, ())}
    return {name: command for name, command in able.items() if Path(command[0]).exists()}


def measure(command: Sequence[str], matter: str) -> float:
    """Seconds, or MiB. Raises: SystemExit with its output, if the job does not end as it should or in time."""
    ends_badly = matter in ("exit", "killed")
    start = time.monotonic()
    memory = 0.0
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryFile("w+") as output,
        marked_job([*command, matter, name], output) as (job, mark),
    ):
        folder = Path(name)
        try:
            if matter == "memory":
                wait_until(lambda: all((folder / f"pid.{rank}").exists() for rank in range(N)), LIMIT, job)
                ranks = {int((folder / f"pid.{rank}").read_text()) for rank in range(N)}
                memory = sum(pss(pid) for pid in processes(mark) if pid not in ranks) / N
                (folder / "enough").touch()
            code = job.wait(LIMIT)
            if ends_badly:
                wait_until(lambda: not processes(mark), LIMIT)
            end = time.monotonic()
        except subprocess.TimeoutExpired:
            code = None
        failed = (folder / "failed.1").exists()
        if code is None or (code != 0) != ends_badly or failed != (ends_badly or matter == "restart"):
            output.seek(0)
            raise SystemExit(f"{matter}: {' '.join(command)} ended with {code}:\n{output.read()}")
        if matter == "first":
            return latest(folder, "first0") - start
        if matter == "restart":
            return latest(folder, "first1") - latest(folder, "failed")
        return end - latest(folder, "failed") if ends_badly else memory


def measure_again(name: str, command: Sequence[str], matter: str) -> float:
    """What `measure` returns. torchrun is tried again, and counts as the limit if it never ends as it should."""
    if not name.startswith("torchrun"):
        return measure(command, matter)
    for _ in range(TRIES):
        try:
            return measure(command, matter)
        except SystemExit as failure:
            print(f"{name}: {str(failure).splitlines()[0]}", flush=True)
    return LIMIT


def latest(folder: Path, name: str) -> float:
    """The last of the moments that ranks have noted under a name."""
    return max(float(path.read_text()) for path in folder.glob(f"{name}.[0-9]"))


def pss(pid: int) -> float:
    """Proportional set size in MiB: pages shared by n processes count 1/n in each."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    args = harness.parser(__doc__, rounds=10, only=MATTERS).parse_args()
    results: dict[str, harness.Rounds] = {}
    goals = []
    for matter in args.only:
        commands = implementations(matter)
        calls = {name: partial(measure_again, name, command, matter) for name, command in commands.items()}
        rounds = results[matter] = harness.take_turns(calls, args.rounds, warmup=1)
        harness.show(f"{matter}, {'MiB a rank' if matter == 'memory' else 's'}", rounds)
        for name in [name for name in rounds if name.startswith("torchrun") and matter != "memory"]:
            ratio = harness.median_ratio(rounds["ddp-launch"], rounds[name])
            goals.append(harness.at_most(f"{matter}: ddp-launch / {name}", GOAL, ratio))
    harness.write(args.json, "startup", goals, ranks=N, rounds=results)


if __name__ == "__main__":
    main()
