"""Workers in whole programs: how these find their datasets, and that nothing is left of them however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

HEAD = """
import os, sys, time
import numpy as np
import ddp
from ddp.data import Dataset, TensorDataset
from ddp.data import DataLoader
"""
MINE = """
class Mine(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.array([index, os.getpid()])
"""
SLOW = MINE.replace("return np", "time.sleep(0.01)\n        return np").replace("6", "600")


def script(folder: Path, *parts: str) -> list[str]:
    (folder / "program.py").write_text("".join(parts))
    return [sys.executable, str(folder / "program.py")]


def test_what_the_script_defines_and_what_workers_leave(run_job: Run, tmp_path: Path) -> None:
    """Nothing is left open, semaphores are unlinked, and what workers print comes in whole lines."""
    use = """
import multiprocessing
from typing import NamedTuple

class Row(NamedTuple):
    x: object

class Rows(Mine):
    def __getitem__(self, index):
        return Row(super().__getitem__(index))

class Loud(Mine):
    def __getitem__(self, index):
        print("sample", index, "read", flush=False)
        self.lock = multiprocessing.Lock()  # as a progress bar of tqdm makes one
        return index

print("imported as", __name__, "with", sys.argv[1])
if __name__ == "__main__":
    loader = DataLoader(Rows(), batch_size=2, num_workers=2)
    batches = [batch for _ in range(2) for batch in loader]
    assert {type(batch) for batch in batches} == {Row}
    rows = [row for batch in batches for row in batch.x.tolist()]
    print([index for index, _ in rows], len({pid for _, pid in rows} - {os.getpid()}))
    loader = DataLoader(Loud(), batch_size=1, num_workers=3)
    print([batch.item() for _ in range(3) for batch in loader])
"""
    python, program = script(tmp_path, HEAD, MINE, use)
    done = run_job([python, "-u", "-W", "error", program, "--flag"])
    assert (done.returncode, done.stderr) == (0, "")  # the resource tracker would tell of semaphores
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(
        [
            "imported as __main__ with --flag",
            "imported as __mp_main__ with --flag",  # by the server, for all workers
            f"{[*range(6)] * 2} 4",
            *[f"sample {index} read" for index in range(6)] * 3,
            str([*range(6)] * 3),
        ]
    )


def test_a_script_that_is_not_needed_is_not_imported(run_job: Run, tmp_path: Path) -> None:
    use = """
print("once")
loader = DataLoader(TensorDataset(ddp.arange(6)), batch_size=4, num_workers=2)
print([batch[0].tolist() for batch in loader])
"""
    done = run_job(script(tmp_path, HEAD, use), code=0)
    assert done.stdout == "once\n[[0, 1, 2, 3], [4, 5]]\n"


@pytest.mark.parametrize(
    "before",
    ["ddp.DataParallel(ddp.nn.Linear(1, 1))\n", "open(__file__ + '.lock', 'x')\n"],
    ids=["after a model", "after what can be done once"],
)
def test_a_script_without_a_guard_is_told_so(run_job: Run, tmp_path: Path, before: str) -> None:
    use = "for batch in DataLoader(Mine(), batch_size=2, num_workers=2): print(batch)\n"
    done = run_job(script(tmp_path, HEAD, MINE, before, use))
    assert done.returncode == 1
    assert done.stdout == ""
    assert 'if __name__ == "__main__":' in done.stderr.strip().splitlines()[-1]
    assert done.stderr.count("In the worker:") == 1


def test_a_script_from_standard_input_is_told_so(run_job: Run) -> None:
    use = "list(DataLoader(Mine(), num_workers=1))"
    done = run_job([sys.executable, "-c", HEAD + MINE + use])
    assert done.returncode == 1
    assert "is defined in an interactive session" in done.stderr.strip().splitlines()[-1]


@pytest.mark.mpi
@pytest.mark.parametrize(
    "early",
    [
        pytest.param("from mpi4py import MPI\n", id="MPI in the script"),
        pytest.param("", id="plain", marks=pytest.mark.long),
    ],
)
def test_ranks_have_workers(run_job: Run, tmp_path: Path, early: str) -> None:
    use = """
import collectives
from ddp.data import DistributedSampler, IterableDataset

class OfTheRank(IterableDataset):
    def __iter__(self):
        comm = collectives.init()  # in a worker, which is no rank
        yield from range(comm.rank, 4, comm.size)

if __name__ == "__main__":
    comm = collectives.init()
    loader = DataLoader(Mine(), 2, sampler=DistributedSampler(range(6), shuffle=False), num_workers=2)
    mine = [batch[:, 0].tolist() for batch in loader]
    print(comm.all_gather_object(mine))
    print(comm.all_gather_object([batch.tolist() for batch in DataLoader(OfTheRank(), 2, num_workers=1)]))
"""
    command = script(tmp_path, early, HEAD, MINE, use)
    done = run_job([sys.executable, "-m", "launcher", "-n", "2", *command[1:]], timeout=90, code=0)
    assert done.stdout.count("[[[0, 2], [4]], [[1, 3], [5]]]") == 2
    assert done.stdout.count("[[[0, 2]], [[1, 3]]]") == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_program_and_leave_no_files(start_job: Any, tmp_path: Path, number: int) -> None:
    use = """
if __name__ == "__main__":
    for batch in DataLoader(Mine(), batch_size=20, num_workers=2):
        print(os.getpid(), flush=True)
"""
    folder = tmp_path / ("long" * 30)  # more than the path of a socket may have
    folder.mkdir()
    job = start_job(script(tmp_path, HEAD, SLOW, use), env={"TMPDIR": str(folder)})
    assert int(job.process.stdout.readline()) == job.process.pid
    assert os.listdir(folder) == []  # nor would a scheduler that kills all processes leave any
    if number == signal.SIGINT:
        for pid in set(job.pids()) - {job.process.pid}:
            os.kill(pid, signal.SIGTERM)  # as schedulers do; it is the program's to handle
        for _ in range(4):
            assert job.process.stdout.readline()
    assert len(job.pids()) >= 4
    if number == signal.SIGINT:
        os.killpg(job.process.pid, number)  # as a terminal does
    else:
        job.process.send_signal(number)
    done = job.wait(20)
    assert done.returncode == -number
    assert os.listdir(folder) == []
    assert done.stderr.count("Traceback") == (number == signal.SIGINT)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt" if number == signal.SIGINT else "")
