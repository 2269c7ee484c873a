"""Fixtures of all tests. A job started here has a hard time limit, and a test fails if it leaves a process behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import python_path

# A shell's background job ignores SIGINT, and so would all that is started from it: Ctrl-C could not be tested there.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run beside each other. With a thread a core in each, PyTorch's threads wait for one another in loops: a third of
# the processor's time in all, and two thirds in tests/ddp/nn. Set before NumPy and PyTorch are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
# Packages that take long to import, and of which jobs under test want little.
STANDINS = ROOT / "tests" / "standins"
# A scontrol, for PATH.
SLURM = STANDINS / "slurm"
MARK = "DDP_TEST_JOB"
# What the fixture `run_job` is, and others made of it.
Run = Callable[..., "Ended"]


GPU = "a GPU and its libraries"
# What skipped tests need: a pattern of the reason that they give, its name, and the extra of setup.cfg that brings it.
NEEDS = (
    (r"torch|safetensors|oracle", "PyTorch and safetensors", "oracle"),
    (r"NVRTC", "NVRTC", "nvrtc"),
    (r"tensorboard", "TensorBoard", "tensorboard"),
    (r"recipes", "libraries of docs/recipes.md", "recipes"),
    (r"wandb|mlflow", "the clients of W&B and MLflow", "wandb,mlflow"),
    (r"matplotlib", "matplotlib", "bench"),
    (r"nbclient|nbformat|ipykernel", "Jupyter's kernel", "jupyter"),
    (r"prometheus", "Prometheus's client", "prometheus"),
    (r"CuPy|cupy|GPU|CUDA|cublas|cudnn|nccl", GPU, ""),
    (r"", "something else: -rs says what", ""),
)
SKIPPED = "ddp/skipped"  # the key of pytest's cache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run full counts of randomized tests, and tests marked long")
    parser.addoption("--skipped", action="store_true", help="run the tests that the last run skipped")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def need_of(reason: str) -> tuple[str, str]:
    """The name of what a skipped test needs, and the extra that brings it."""
    return next((name, extra) for pattern, name, extra in NEEDS if re.search(pattern, reason))


def describe_skips(reasons: Sequence[str]) -> str:
    """One line: how many were skipped, what they need, and how to run more of them."""
    count: Counter[tuple[str, str]] = Counter()
    for reason in reasons:
        count[need_of(reason)] += 1
    missing = ", ".join(f"{name} ({number})" for (name, _), number in count.most_common())
    line = f"{len(reasons)} skipped, a file that needs something as a whole counted once. Missing: {missing}"
    extras = [extra for _, extra in count if extra]
    if extras:
        more = sum(number for (_, extra), number in count.items() if extra)
        line += f". {more} of them run after: pip install -e '.[{','.join(extras)}]'"
    return line


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    if reports:
        terminalreporter.write_line(describe_skips([report.longrepr[2] for report in reports]))
    if not config.getoption("--skipped") and config.pluginmanager.hasplugin("cacheprovider"):
        # Each file has its own line that skips it: pytest-xdist reports one file for each such line.
        # No installation brings a GPU: pytest -m gpu runs what needs one.
        installable = [report for report in reports if need_of(report.longrepr[2])[0] != GPU]
        config.cache.set(SKIPPED, sorted({function_of(report.nodeid) for report in installable}))


def function_of(nodeid: str) -> str:
    """A test's id without its parameters, which may depend on what is installed."""
    return nodeid.partition("[")[0]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--skipped") or collection_path.is_dir():
        return None
    files = {nodeid.partition("::")[0] for nodeid in config.cache.get(SKIPPED, [])}
    return str(collection_path.relative_to(ROOT)) not in files or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: more workers than cores, because tests that start processes spend half of their time waiting.

    Each begins in a part of its own, so that not all wait, or compute, at the same time.
    """
    if config.option.dist == "no":
        config.option.dist = "worksteal"
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # it is xdist's to read
    return max(2, 3 * len(os.sched_getaffinity(0)) // 2)


@pytest.hookimpl(trylast=True)  # what others leave out is left out by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Applies --skipped and --shuffle, skips tests marked root for other users, and without --long those marked long.

    The last are deselected: to report them one by one takes half a minute for thousands.
    """
    if config.getoption("--skipped"):
        skipped = set(config.cache.get(SKIPPED, []))
        items[:] = [item for item in items if {function_of(item.nodeid), item.nodeid.partition("::")[0]} & skipped]
    if config.getoption("--shuffle") is not None:
        random.Random(config.getoption("--shuffle")).shuffle(items)  # the same order in every worker of xdist
    for item in items:
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs the rights of root"))
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]  # an id in brackets is a keyword, too
    if long and len(long) < len(items):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    else:  # one was asked for by its name: who asked hears why it does not run
        for item in long:
            item.add_marker(pytest.mark.skip(reason="takes long: pytest --long runs it"))


def pytest_collection() -> None:
    gc.disable()  # it would look at more and more tests, time and again


def pytest_collection_finish() -> None:
    """What lies there by now stays: no collection of garbage need look at tens of thousands of tests again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor at what the file before has imported, compiled and reported: tests that collect garbage do so often."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How often a randomized test repeats: `count(500, 20_000)` is the first, or the second with --long."""
    return lambda short, long: long if request.config.getoption("--long") else short


class Ended(subprocess.CompletedProcess[str]):
    """What a command has printed."""

    @property
    def last(self) -> str:
        """The last line on stderr."""
        return self.stderr.splitlines()[-1]

    @property
    def lines(self) -> list[str]:
        """The lines on stdout, sorted: ranks print in any order."""
        return sorted(self.stdout.splitlines())


class Job:
    """A process tree under test, found again by a mark in its environment, whatever its parents do."""

    def __init__(self, args: Sequence[str], env: dict[str, str] | None = None, **options: object) -> None:
        self.mark = uuid.uuid4().hex
        env = {"PYTHONPATH": f"{STANDINS}{os.pathsep}{ROOT}", **(env or {})}
        path = python_path(env["PYTHONPATH"])
        everything = {**os.environ, **env, "PYTHONPATH": path, MARK: self.mark}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.args = [str(arg) for arg in args]
        self.process = subprocess.Popen(self.args, env=everything, start_new_session=True, **{**pipes, **options})

    def wait(self, timeout: float = 60.0, leave: float = 5.0, **expected: int | str) -> Ended:
        """The result; fails after `timeout` seconds, or if a process is left `leave` seconds after the end.

        expected: it fails, too, unless the exit code (`code`) and what was printed (`out`, `err`) are these
        """
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            table = self.table()
            self.kill()
            out, err = self.process.communicate()
            pytest.fail(f"{self.args} still ran after {timeout} s\n{table}\n--- stdout\n{out}\n--- stderr\n{err}")
        self.assert_gone(leave)
        actual = {"code": self.process.returncode, "out": out, "err": err}
        for name, value in expected.items():
            assert actual[name] == value, f"{name} of {self.args}\n--- stdout\n{out}\n--- stderr\n{err}"
        return Ended(self.args, self.process.returncode, out, err)

    def assert_gone(self, within: float = 5.0) -> None:
        """Fails if `within` seconds from now a process of this job still runs."""
        deadline = time.monotonic() + within
        while self.pids():
            if time.monotonic() > deadline:
                table = self.table()
                self.kill()
                pytest.fail(f"{self.args} left processes behind:\n{table}")
            time.sleep(0.02)

    def table(self) -> str:
        """A line a process."""
        return "\n".join(f"{pid} {text}" for pid, text in self.commands().items())

    def pids(self) -> list[int]:
        """The living processes that carry this job's mark, zombies left out."""
        needle = f"{MARK}={self.mark}".encode()
        results = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended while we looked
                    if needle in (entry / "environ").read_bytes() and not _is_zombie(entry):
                        results.append(int(entry.name))
        return results

    def commands(self) -> dict[int, str]:
        """Their command lines."""
        return {pid: _cmdline(pid) for pid in self.pids()}

    def listening(self) -> dict[str, set[str]]:
        """Where this job's processes listen, "tcp 0100007F:1F90", and the names of those that do."""
        addresses = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    addresses[f"socket:[{fields[9]}]"] = f"{table} {fields[1]}"
        result: dict[str, set[str]] = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):  # it ended while we looked
                for fd in Path(f"/proc/{pid}/fd").iterdir():
                    if (target := os.readlink(fd)) in addresses:
                        result.setdefault(addresses[target], set()).add(Path(f"/proc/{pid}/comm").read_text().strip())
        return result

    def listening_outside(self, engine: bool = False) -> list[str]:
        """Where they listen beyond the loopback. engine: the sockets of an MPI's own programs count, too"""
        local = ("tcp 0100007F:", "tcp6 00000000000000000000000001000000:", "tcp6 0000000000000000FFFF00000100007F:")
        engines = {"mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun"} if not engine else set()
        result = self.listening()
        return [address for address in result if not address.startswith(local) and not result[address] & engines]

    def kill(self) -> None:
        """Kills whatever is left of the job."""
        for _ in range(50):
            pids = self.pids()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _cmdline(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "(gone)"


@pytest.fixture
def start_job() -> Iterator[Callable[..., Job]]:
    """Starts a process tree and returns it as a `Job`; whatever is left of it dies with the test."""
    jobs: list[Job] = []

    def start(args: Sequence[str], **options: object) -> Job:
        jobs.append(Job(args, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.process.communicate()


@pytest.fixture
def run_job(start_job: Callable[..., Job]) -> Run:
    """Runs a command to its end: `run_job([...], timeout=60, env={...}, code=0)`; nothing may be left of it.

    code, out, err: the exit code and what is printed must be these
    """

    def run(args: Sequence[str], timeout: float = 60.0, **options: object) -> Ended:
        expected: Any = {name: options.pop(name) for name in ("code", "out", "err") if name in options}
        return start_job(args, **options).wait(timeout, **expected)

    return run


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is the oracle here")


def executable(path: Path, text: str) -> str:
    """Writes a program, and returns its path."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def wait_until(done: Callable[[], Any], limit: float = 30.0) -> None:
    """Waits until `done()` is true; fails after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not done():
        assert time.monotonic() < deadline, f"waited {limit} s"
        time.sleep(0.02)


def has_mpich() -> bool:
    """Whether ranks load MPICH here, wherever it is installed."""
    from launcher.engines.mpiexec import MPICH, family_of_this_python

    return family_of_this_python(os.environ) == MPICH


@pytest.fixture
def mpiexec() -> list[str]:
    """The engine that ddp-launch finds, bare: `[*mpiexec, "-n", "2", sys.executable, "script.py"]`."""
    from launcher.engines.mpiexec import find_mpiexec_for
    from launcher.errors import UsageError

    try:
        return [find_mpiexec_for("auto")[0]]
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in of `tests.gpu` in the place of CuPy; parametrized with ("simulated", seed) or "real", too."""
    from collectives.backends.device import cuda
    from tests.gpu import installing  # few tests want it

    if getattr(request, "param", "") == "real":
        return installing.Real()
    monkeypatch.setattr(cuda, "why_absent", lambda: None)  # it looks for a driver
    wanted = getattr(request, "param", "eager")
    mode, seed = wanted if isinstance(wanted, tuple) else (wanted, 0)
    return installing.Gpu(monkeypatch, None if mode == "eager" else seed)


@pytest.fixture(autouse=True)
def _signal_handlers_are_put_back() -> Iterator[None]:
    """A command that runs in the process of a test may set some, and a signal would then end it in another test."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: it was not set in Python
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _nothing_of_a_gpu_stays() -> Iterator[None]:
    """What remembers the stand-in of a test lets go of it: tests of the CPU may come after it in the same process."""
    yield
    installing, stream_sync = (sys.modules.get(name) for name in ("tests.gpu.installing", "ddp._engine.stream_sync"))
    if installing is not None and installing.MADE:
        installing.forget()
    if stream_sync is not None:
        stream_sync.switch.on = stream_sync.switch.blocking = stream_sync.switch.several_gpus = False
        stream_sync.state.observers = tuple(
            observer for observer in stream_sync.state.observers if observer is not stream_sync.note_stream
        )


@pytest.fixture(autouse=True, scope="session")
def _openmpi_as_tests_need_it() -> Iterator[None]:
    """Bare Open MPI refuses to run as root and to start more ranks than cores; other engines ignore these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
        patch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        patch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        yield
