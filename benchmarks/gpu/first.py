"""The first minutes on a GPU: does everything work, and how fast is it? For a new machine, and for a bug report.

    python -m benchmarks.gpu.first [--limit 570] [--out FOLDER] [--only kernels,ranks]
    python -m benchmarks.gpu.first --device cpu    # the steps that a CPU can run

Every step is a process with a time limit, and what finds most in least time comes first. After each step two files are
written anew: `first.json`, with verdict, seconds and last lines of every step, and `logs.tgz`, with all that they
printed. A step that fails does not stop the next one. When time is short, a step that would have less than half of what
it may take is left out. `first_steps.py` has what the steps do that are not tests or benchmarks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness
from ddp._files import atomic_write
from launcher.linux import become_subreaper, die_with_parent, sweep

NOTHING_CAN_RUN = 77  # exit status of a step after which no other need be tried; its last line says why
WARNING = "warning: "  # begins a line of a step's output that its verdict repeats
PASSED = "passed"
INTERRUPTED = "interrupted"
NO_TIME = "no time left"
GRACE = 8.0  # s that a step has after SIGINT: pytest reports what it has run
RESERVE = 15.0  # s of the whole limit that no step gets: to end the last one, and to write the results
TAIL = 8_000  # bytes of a step's log that the results keep
SHOWN = 12  # lines that the summary repeats of a step that failed
MODELS = ("small-gpt", "gpt2", "resnet18")
VERSIONS = "versions.json"


class Step(NamedTuple):
    """A process.

    limit: seconds that it may take; environ: more of its environment; takes_limit: the command has an option --limit,
    and is given the seconds that are left for it
    """

    name: str
    limit: float
    command: Sequence[str]
    environ: Mapping[str, str] = {}
    takes_limit: bool = False


class Result(NamedTuple):
    """How a step went."""

    step: str
    verdict: str
    seconds: float = 0.0
    last_lines: Sequence[str] = ("",)


# --- the steps -----------------------------------------------------------------------------------------------------


def table(device: str, logs: Path) -> Iterator[Step]:
    """All steps on a device, "cuda" or "cpu", in their order. logs: where they may leave files"""
    cuda = device == "cuda"
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}  # an error names its op
    yield Step("versions", 60, step_command("versions", device, str(logs / VERSIONS)))
    if cuda:
        yield pytest_step("products", 60, logs, "tests/gpu/test_gemm.py")
        yield Step("compile", 60, step_command("compile", device))
    yield Step("kernels", 45, step_command("kernels", device), blocking)
    yield Step("derivatives", 45, step_command("derivatives", device), blocking)
    for size in ("tiny", "full"):
        for model in MODELS:
            environ = blocking if size == "tiny" else {}
            yield Step(f"{size}-{model}", 45, step_command(size, device, model, "ddp"), environ)
            if cuda:
                yield Step(f"{size}-{model}-graph", 45, step_command(size, device, model, "ddp-graph"))
    if cuda:
        yield from on_cuda_alone(device, logs)
    for task, limit in (("gpt2", 170), ("resnet18", 100), ("small-gpt", 100), ("loader", 45)):
        options = ["--device", device, "--only", task, "--rounds", "7", "--json", str(logs / f"gpu-{task}.json")]
        yield Step(f"measure-{task}", limit, [sys.executable, "-m", "benchmarks.gpu", *options], takes_limit=True)


def step_command(step: str, device: str, *arguments: str) -> list[str]:
    """The command of a step of `first_steps.py`."""
    return [sys.executable, "-m", "benchmarks.gpu.first_steps", step, device, *arguments]


def on_cuda_alone(device: str, logs: Path) -> Iterator[Step]:
    """NVIDIA's checker of accesses, where it is installed, and the tests that need a GPU."""
    if shutil.which("compute-sanitizer"):
        tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--launch-timeout", "60"]
        yield Step("memcheck", 75, [*tool, *step_command("memcheck", device)])
    # By files: collecting all others takes longer than many of these run.
    yield pytest_step("tests-real", 90, logs, "tests/gpu/test_real.py")
    yield pytest_step("tests-ops", 110, logs, "tests/ddp/test_gpu.py", "tests/examples/test_cuda_kernel.py")
    others = ["--ignore=tests/gpu/test_real.py", "--ignore=tests/gpu/test_gemm.py", "tests/gpu"]
    yield pytest_step("tests-gpu", 110, logs, *others, "tests/ddp/data/test_collate.py")
    yield pytest_step("ranks", 90, logs, "tests/collectives/backends/device/test_real.py")


def pytest_step(name: str, limit: float, logs: Path, *paths: str) -> Step:
    """`pytest -m gpu` in twelve processes: many tests compile a kernel first, which takes 0.2 to 5 s."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-m", "gpu", "-n", "12", f"--junitxml={logs / name}.xml"]
    # A warning of another version, or a file that one library breaks, is no reason to run nothing.
    command += ["-W", "default", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    return Step(name, limit, [*command, *paths])


# --- running them --------------------------------------------------------------------------------------------------


def run(step: Step, left: float, logs: Path) -> Result:
    """Runs a step to its end, at most for `left` seconds, and ends all that it has started."""
    limit = min(step.limit, left)
    if limit < step.limit / 2:
        return Result(step.name, NO_TIME)
    command = [*step.command, "--limit", f"{limit - GRACE:.0f}"] if step.takes_limit else step.command
    ours = {
        "PYTHONPATH": harness.python_path(harness.ROOT),
        "PYTHONUNBUFFERED": "1",  # what a step has printed is there when it is killed
        "PYTHONFAULTHANDLER": "1",
        "NCCL_SOCKET_IFNAME": "lo",  # ranks are on one machine, which may have no network
    }
    log = logs / f"{step.name}.txt"
    start = time.monotonic()
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=harness.ROOT,
                env={**os.environ, **ours, **step.environ},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        verdict = wait(process, limit)
    except OSError as error:
        verdict = f"failed: {error.strerror}"
    lines = last_lines(log)
    verdict = "; ".join([verdict, *(line for line in lines if line.startswith(WARNING))])
    return Result(step.name, verdict, round(time.monotonic() - start, 1), lines)


def wait(process: subprocess.Popen[bytes], limit: float) -> str:
    """The verdict on a step once it, and every process that it has left, has ended."""
    try:
        return verdict_of(process.wait(limit))
    except subprocess.TimeoutExpired:
        return f"failed: not finished after {limit:.0f} s"
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(GRACE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # it does not listen, or Ctrl-C was pressed again
            process.kill()
            process.wait()
        sweep(limit=3.0)


def verdict_of(status: int) -> str:
    """What an exit status, or minus a signal, says."""
    if status < 0:
        return f"failed: {signal.strsignal(-status)}"
    return f"failed: exit status {status}" if status else PASSED


def last_lines(log: Path) -> list[str]:
    """The end of what a step has printed, as text that a terminal can show."""
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[-TAIL:].decode("ascii", "backslashreplace").expandtabs().splitlines()
        return [line if line.isprintable() else repr(line) for line in lines or [""]]
    return [""]


def run_all(steps: Iterable[Step], limit: float, logs: Path, out: Path) -> bool:
    """Runs steps one after another, and prints what became of them; whether all have passed and are written down.

    limit: seconds for all. Raises: SystemExit with a sentence if there is nothing that could run.
    """
    deadline = time.monotonic() + limit - RESERVE
    results: list[Result] = []
    written = False
    for step in steps:
        result = run(step, deadline - time.monotonic(), logs)
        results.append(result)
        written = write(out, logs, results)
        # Where a step has written its file is of no use: the folder goes, and the file is in logs.tgz.
        last_line = next((line for line in reversed(result.last_lines) if not line.startswith("written to ")), "")
        if verdict_of(NOTHING_CAN_RUN) in result.verdict:
            sys.exit(f"benchmarks.gpu.first: {last_line}; --device cpu runs what a CPU can")
        row = harness.row(step.name, [f"{result.seconds:.1f} s"], 22, 9)
        print(f"{row}  {result.verdict}  {last_line[:100]}", flush=True)
        if result.verdict.startswith(INTERRUPTED):
            break
    failed = [result for result in results if not result.verdict.startswith(PASSED)]
    for result in failed:
        print(f"\n== {result.step}: {result.verdict}", *result.last_lines[-SHOWN:], sep="\n")
    print(f"\n{len(results) - len(failed)} of {len(results)} steps passed")
    return written and not failed


def write(out: Path, logs: Path, results: Sequence[Result]) -> bool:
    """Writes both files anew. Returns: whether it could; else a line says why, and the files of before stay."""
    versions = None
    with contextlib.suppress(OSError, ValueError):  # that step has not written them
        versions = json.loads((logs / VERSIONS).read_text())
    document = {"versions": versions, "steps": [result._asdict() for result in results]}
    try:
        with atomic_write(out / "first.json") as file:
            file.write(json.dumps(document, indent=1).encode())
        with atomic_write(out / "logs.tgz") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            tar.add(logs, "logs")
    except OSError as error:
        print(f"the results cannot be written to {out}: {error.strerror}; those of before stay there")
        return False
    return True


def main(make_steps: Callable[[str, Path], Iterable[Step]] = table) -> None:
    names = [step.name for step in make_steps("cuda", Path())]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=570, help="seconds for all steps together (default: 570)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for first.json and logs.tgz (default: .)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    text = f"run only versions and some of {', '.join(names)} (default: all)"
    parser.add_argument("--only", type=harness.listed(names), default=names, help=text)
    args = parser.parse_args()
    # SIGTERM, which `timeout` sends, is the same as Ctrl-C; and that works in a shell's background job, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    become_subreaper()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder)
            steps = [step for step in make_steps(args.device, logs) if step.name in ("versions", *args.only)]
            sys.exit(0 if run_all(steps, args.limit, logs, args.out) else 1)
    except (OSError, KeyboardInterrupt) as error:
        sys.exit(f"benchmarks.gpu.first: {str(error) or 'interrupted between two steps'}")


if __name__ == "__main__":
    main()
