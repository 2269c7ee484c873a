"""How long `import ddp` takes beside `import numpy`: CPU time in fresh processes, bytecode cached.

    python benchmarks/import_time.py [--runs 15] [--json FILE]

Goal: at most 1.5 times NumPy's. Rounds alternate, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODULES = ("numpy", "ddp", "collectives.start")


def seconds(module: str, cache: str) -> float:
    """CPU seconds of importing one module in a fresh process."""
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environ
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="rounds after one that fills the cache (default: 15)")
    parser.add_argument("--json", type=Path, default=Path("import_time.json"), help="where the results go")
    args = parser.parse_args()
    times: dict[str, list[float]] = {module: [] for module in MODULES}
    with tempfile.TemporaryDirectory() as cache:
        for round_ in range(args.runs + 1):
            for module in MODULES:
                taken = seconds(module, cache)
                if round_ > 0:
                    times[module].append(taken)
    medians = {module: statistics.median(taken) for module, taken in times.items()}
    for module, median in medians.items():
        print(f"import {module:<18} {1000 * median:6.1f} ms, {median / medians['numpy']:.2f} times NumPy's")
    results = {
        "benchmark": "import_time",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds": times,
        "medians": medians,
    }
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
