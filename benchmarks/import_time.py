"""How long `import ddp` takes against `import numpy`: CPU time in fresh processes, bytecode cached.

    python -m benchmarks.import_time [--rounds 15] [--json FILE]

Goal: at most 1.3 times NumPy's. Rounds alternate, so that both see the same machine.
"""

from __future__ import annotations

import tempfile

from benchmarks import harness

GOAL = 1.3
MODULES = ("numpy", "ddp", "collectives.start")


def seconds(module: str, cache: str) -> float:
    """CPU seconds of importing one module in a fresh process."""
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    return harness.printed(code, PYTHONPYCACHEPREFIX=cache, PYTHONDONTWRITEBYTECODE="")


def main() -> None:
    args = harness.parser(__doc__, rounds=15).parse_args()
    with tempfile.TemporaryDirectory() as cache:
        calls = {module: lambda module=module: seconds(module, cache) for module in MODULES}
        times = harness.take_turns(calls, args.rounds, warmup=1)  # which fills the cache
    for module, median in harness.medians(times).items():
        ratio = harness.median_ratio(times[module], times["numpy"])
        print(harness.row(f"import {module}", [f"{1000 * median:.1f} ms", f"{ratio:.2f} of NumPy's"], 25, 18))
    goal = harness.at_most("import ddp / import numpy", GOAL, harness.median_ratio(times["ddp"], times["numpy"]))
    harness.write(args.json, "import_time", [goal], seconds=times, medians=harness.medians(times))


if __name__ == "__main__":
    main()
