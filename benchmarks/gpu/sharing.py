"""Two ranks on one GPU: do they train what one rank trains? NCCL lets ranks share one from 2.30 on, if asked to.

Below that they agree on MPI, and the row says so. That the collectives themselves keep their contract there is tested
by `pytest -m gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.gpu.turns import ROOT

LIMIT = 90.0  # s
TOLERANCE = 1e-4  # of float32 sums in another order


def measure(device: str) -> dict[str, Any]:
    """carried, ranks, the largest difference of a weight, and whether that is rounding.

    Raises: RuntimeError with the end of the job's output if it fails.
    """
    shared = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    share = ["--share-gpu"] if device == "cuda" else []
    command = [sys.executable, "-m", "launcher", "-n", "2", *share, "-m", "benchmarks.gpu.pair", device]
    environment = {**os.environ, **(shared if device == "cuda" else {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    said = [line for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not said:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    found = json.loads(said[-1][said[-1].index("{") :])
    return {**found, "equal": bool(found["difference"] <= TOLERANCE)}


def line(found: dict[str, Any]) -> str:
    """For the table."""
    if "error" in found:
        return f"two ranks on one device: {found['error']}"
    verdict = "equal to one rank" if found["equal"] else "NOT equal to one rank"
    return f"two ranks on one device ({found['carried']}): {verdict}, largest difference {found['difference']:.1e}"
