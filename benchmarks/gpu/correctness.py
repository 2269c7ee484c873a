"""The tests that need a GPU, in a run of their own: in parallel, with a time limit, and what fails in a file.

    python -m benchmarks.gpu.correctness [--limit 540] [--workers 12] [--json FILE] [PATH ...]

Thousands of cases, each of which may compile a kernel (0.2 to 5 s of NVRTC, which CuPy keeps in CUPY_CACHE_DIR): so
they run in several processes. When time runs out they are interrupted, and those that have run are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.turns import ROOT

#: Where tests are marked `gpu`: collecting all others takes longer than many of these run.
PATHS = (
    *("tests/gpu", "tests/ddp/test_gpu.py", "tests/ddp/data/test_collate.py", "tests/ddp/parallel/gpu/test_real.py"),
    *("tests/collectives/backends/device/test_real.py", "tests/examples/test_cuda_kernel.py"),
)
GRACE = 20.0  # s that the tests have to report, when they are interrupted


def run_tests(limit: float, workers: int, paths: Sequence[str] = PATHS) -> dict[str, Any]:
    """`pytest -m gpu`: how many passed, and what failed with the end of its report.

    Where time runs out it is interrupted, as by Ctrl-C, and tells of the tests it has run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, said = Path(folder) / "report.xml", Path(folder) / "said"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", str(workers), f"--junitxml={report}"]
        # A warning of another version, or a file that one library breaks, is no reason to run nothing.
        command += ["-W", "default", "--continue-on-collection-errors", "-p", "no:cacheprovider", *paths]
        with said.open("w") as to:
            pytest = subprocess.Popen(command, cwd=ROOT, stdout=to, stderr=subprocess.STDOUT, start_new_session=True)
        late = ""
        try:
            pytest.wait(limit)
        except subprocess.TimeoutExpired:
            late = f", not finished after {limit:.0f} s"
            pytest.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)  # and whatever it started
        status = pytest.wait()
        if not report.exists():
            return {"summary": f"exit code {status}{late}: {said.read_text()[-500:]}", "failed": {}}
        cases = [*ElementTree.parse(report).iter("testcase")]
    failed = {}
    for case in cases:
        for trouble in (*case.iter("failure"), *case.iter("error")):
            failed[f"{case.get('classname')}::{case.get('name')}"] = (trouble.text or "")[-2000:]
    skipped = sum(case.find("skipped") is not None for case in cases)
    summary = f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped{late}"
    return {"summary": summary, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=540, help="seconds in all (default: 540)")
    parser.add_argument("--workers", type=int, default=12, help="processes (default: 12)")
    parser.add_argument("--json", type=Path, default=Path("gpu-tests.json"), help="default: gpu-tests.json")
    parser.add_argument("paths", nargs="*", default=PATHS, metavar="PATH", help="default: wherever tests need a GPU")
    args = parser.parse_args()
    found = run_tests(args.limit - GRACE, args.workers, args.paths)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"pytest -m gpu: {found['summary']}", *found["failed"], sep="\n  ")
    print(f"written to {args.json}")
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
