"""How long `import ddp` takes beside `import numpy`: CPU time in fresh processes, bytecode cached.

    python benchmarks/import_time.py [--rounds 15] [--json FILE]

Goal: at most 1.3 times NumPy's. Rounds alternate, so that both see the same machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# A script's folder comes first on its path, where `collectives.py` hides the package of that name.
sys.path[:] = [str(HERE.parent), *(each for each in sys.path if Path(each).resolve() != HERE)]

from benchmarks import harness  # noqa: E402

GOAL = 1.3
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
    args = harness.parser(__doc__, rounds=15, json_file="import_time.json").parse_args()
    with tempfile.TemporaryDirectory() as cache:
        calls = {module: lambda module=module: seconds(module, cache) for module in MODULES}
        times = harness.take_turns(calls, args.rounds, warmup=1)  # which fills the cache
    medians = harness.medians(times)
    for module, median in medians.items():
        print(f"import {module:<18} {1000 * median:6.1f} ms, {median / medians['numpy']:.2f} times NumPy's")
    harness.show_goals([harness.at_most("import ddp / import numpy", GOAL, harness.over(times["ddp"], times["numpy"]))])
    harness.write(args.json, "import_time", seconds=times, medians=medians)


if __name__ == "__main__":
    main()
