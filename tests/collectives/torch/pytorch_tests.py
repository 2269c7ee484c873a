"""Runs PyTorch's own tests of its backends, which are in its wheel, on the backend "ddp".

    python -m tests.collectives.torch.pytorch_tests [--backend NAME] [--jsonl FILE] [NAME ...]

Those tests ask by name what a backend can do. So by default "ddp" stands in for gloo, under its name, and runs what
gloo runs. `--backend ddp` runs under its own name what is not for one backend alone, and what is for MPI alone;
`--backend gloo` runs gloo itself. Processes are forked from one that has loaded PyTorch: to spawn them would take up to
a minute a test.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

STANDS_IN = "TEST_STANDS_IN"
BACKENDS = {
    "ddp as gloo": {"BACKEND": "gloo", STANDS_IN: "1"},
    "ddp": {"BACKEND": "mpi", STANDS_IN: "0"},
    "gloo": {"BACKEND": "gloo", STANDS_IN: "0"},
}
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("TEMP_DIR", "/tmp")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "90")  # s, a test
os.environ.setdefault(STANDS_IN, "1")

import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

if os.environ[STANDS_IN] == "1":
    from collectives.torch import process_group
    from collectives.torch.process_group import CollectivesGroup, ProfilerEvent, create

    class StandIn(CollectivesGroup):
        """The group by gloo's constructor. PyTorch says after it which ranks it has, and then sets a number."""

        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            dist.ProcessGroup.__init__(self, rank, size)
            self.options = SimpleNamespace(
                store=store, group_rank=rank, group_size=size, timeout=timeout, _timeout=timeout
            )

        def _set_sequence_number_for_group(self) -> None:
            self.__dict__.update(vars(create(self.options)))

    def create_alone(options: Any, backend_options: Any = None) -> Any:
        """The group of "ddp", as if no other backend were asked for, which is what the name gloo means to `create`."""
        names = ("store", "group_rank", "group_size", "timeout", "global_ranks_in_group")
        return create(SimpleNamespace(**{name: getattr(options, name) for name in names}))

    def event(name: str, inputs: Any) -> ProfilerEvent:
        return ProfilerEvent(name.replace("ddp", "gloo"), inputs)

    process_group.ProfilerEvent = event  # type: ignore[assignment, misc]
    distributed_c10d.ProcessGroupGloo = StandIn
    dist.Backend._plugins["GLOO"] = dist.Backend._BackendPlugin(create_alone, True)  # where PyTorch looks from 2.14 on

from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

# Tests are chosen by these as the module that holds them is read.
for backends in DistTestCases.backend_feature.values():
    backends.add("mpi")
DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")
from torch.testing._internal.distributed import distributed_test  # noqa: E402

if os.environ["BACKEND"] == "mpi":
    import collectives.torch  # noqa: F401

    distributed_test.BACKEND = "ddp"
# Those whose events of PyTorch's profiler are looked at.
distributed_test.PROFILING_SUPPORTED_BACKENDS.append("ddp")
distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("ddp")


def _run_in(environ: dict[str, str], run: Callable[..., None], *args: Any, **more: Any) -> None:
    os.environ.update(environ)  # a forked process has that of the process it is forked from
    run(*args, **more)


class PyTorchTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All of them."""

    def setUp(self) -> None:
        super().setUp()
        fork = multiprocessing.get_context("forkserver").Process
        environ = dict(os.environ)

        def process(target: Any, args: Any, **more: Any) -> Any:
            return fork(target=_run_in, args=(environ, target, *args), **more)

        self._start_processes(process)

    def _spawn_processes(self) -> None:
        """`setUp` has started them."""


class Recorder(unittest.TestResult):
    """One line for each test: its name, "passed", "skipped" or "failed", seconds, and why."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self.outcomes: dict[str, str] = {}

    def startTest(self, test: Any) -> None:
        self._start = time.monotonic()

    def _record(self, test: Any, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        self.outcomes[name] = outcome
        taken = round(time.monotonic() - self._start, 1)
        line = json.dumps({"name": name, "outcome": outcome, "seconds": taken, "why": why})
        print(line, file=self._file, flush=True)

    def addSuccess(self, test: Any) -> None:
        self._record(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._record(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self._record(test, "failed", str(err[1])[-3000:])

    addError = addFailure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of tests (default: all)")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="ddp as gloo")
    parser.add_argument("--jsonl", help="file for a line a test (default: standard output)")
    arguments = parser.parse_args()
    wanted = BACKENDS[arguments.backend]
    if not wanted.items() <= os.environ.items():  # which the imports above have read
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], os.environ | wanted)
    from tests.collectives.torch import pytorch_tests  # children find its classes there, not in __main__

    multiprocessing.set_forkserver_preload([pytorch_tests.__name__])
    tests = pytorch_tests.PyTorchTests
    names = arguments.names or [name for name in dir(tests) if name.startswith("test_")]
    with open(arguments.jsonl, "a") if arguments.jsonl else os.fdopen(os.dup(1), "w") as file:
        result = Recorder(file)
        unittest.TestSuite(map(tests, names)).run(result)
    print({each: list(result.outcomes.values()).count(each) for each in ("passed", "skipped", "failed")})
    return int("failed" in result.outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
