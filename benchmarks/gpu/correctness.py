"""The tests that need a GPU, in a run of their own: in parallel, with a time limit.

    python -m benchmarks.gpu.correctness [--limit 540] [--workers 12] [--xml FILE] [PATH ...]

Thousands of cases, each of which may compile a kernel (0.2 to 5 s of NVRTC, which CuPy keeps in CUPY_CACHE_DIR): so
they run in several processes. When time runs out they are interrupted, and pytest reports those that have run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.harness import ROOT

#: Where tests are marked `gpu`: collecting all others takes longer than many of these run.
PATHS = (
    *("tests/gpu", "tests/ddp/test_gpu.py", "tests/ddp/data/test_collate.py"),
    *("tests/collectives/backends/device/test_real.py", "tests/examples/test_cuda_kernel.py"),
)
GRACE = 20.0  # s that the tests have to report, when they are interrupted


def run_tests(limit: float, workers: int, paths: Sequence[str] = PATHS, xml: str = "gpu-tests.xml") -> int:
    """`pytest -m gpu`, interrupted as by Ctrl-C after `limit` seconds; its exit code (2: interrupted)."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-m", "gpu", "-n", str(workers), f"--junitxml={xml}"]
    # A warning of another version, or a file that one library breaks, is no reason to run nothing.
    command += ["-W", "default", "--continue-on-collection-errors", "-p", "no:cacheprovider", *paths]
    pytest = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return pytest.wait(limit)
        print(f"not finished after {limit:.0f} s", flush=True)
        pytest.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return pytest.wait(GRACE)
        return 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pytest.pid, signal.SIGKILL)  # and whatever it started
        pytest.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=540, help="seconds in all (default: 540)")
    parser.add_argument("--workers", type=int, default=12, help="processes (default: 12)")
    parser.add_argument("--xml", default="gpu-tests.xml", help="report of pytest (default: gpu-tests.xml)")
    parser.add_argument("paths", nargs="*", default=PATHS, metavar="PATH", help="default: wherever tests need a GPU")
    args = parser.parse_args()
    sys.exit(run_tests(args.limit - GRACE, args.workers, args.paths, args.xml))


if __name__ == "__main__":
    main()
