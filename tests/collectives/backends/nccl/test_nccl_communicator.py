"""Every call of the communicator over the stub, by ranks that are processes: errors, groups, limits and aborts.

What collectives compute is tested on arrays, over the same library: `backends/device/test_stub.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Run

BODIES = Path(__file__).with_name("bodies.py")
Case = tuple[int, str, dict[str, str]]  # how many ranks, their function in bodies.py, its environment


def told_to_fail(function: str, code: int, words: str) -> Case:
    return 2, "told_to_fail", {"NCCL_STUB_FAIL": f"{function}:1:{code}", "WORDS": words}


ARGUMENTS: list[Case] = [(2, "wrong_arguments", {"NCCL_COMM_BLOCKING": blocking}) for blocking in "01"]
CASES = [
    *ARGUMENTS,
    (2, "huge_count", {"NCCL_STUB_DRY": "1"}),
    told_to_fail("ncclCommInitRankConfig", 2, "ncclSystemError"),
    told_to_fail("ncclAllReduce", 8, "ncclTimeout"),
    told_to_fail("ncclBroadcast", 99, "an error of the"),
    told_to_fail("ncclGroupEnd", 6, "ncclRemoteError"),
    told_to_fail("ncclCommGetAsyncError", 3, "ncclInternalError"),
    (2, "close_fails", {"NCCL_STUB_FAIL": "ncclCommFinalize:1:3"}),
    (2, "close_fails", {"NCCL_STUB_FAIL": "ncclCommDestroy:1:3"}),
    (3, "never_comes", {}),
    (2, "hangs_in_a_call", {"NCCL_STUB_HANG": "ncclAllReduce"}),
    (2, "abort_frees_a_stuck_call", {"NCCL_STUB_HANG": "ncclAllReduce"}),
    (2, "abort_in_a_group", {}),
    (3, "lonely_close", {"NCCL_COMM_BLOCKING": "0"}),
    (3, "lonely_close", {"NCCL_COMM_BLOCKING": "1"}),
    (2, "threads_enter_their_device", {}),
    (2, "abort_hangs", {"NCCL_STUB_HANG": "ncclCommAbort"}),
    (2, "watchdog_ends_a_lonely_rank", {}),
]


@pytest.mark.parametrize(("minor", "cases"), [(18, ARGUMENTS), (32, CASES)], ids=["oldest", "newest"])
def test_ranks_over_the_stub(
    run_job: Run, stub: Callable[..., Path], tmp_path: Path, minor: int, cases: list[Case]
) -> None:
    command = [sys.executable, str(BODIES), str(stub(minor)), json.dumps(cases)]
    run_job(command, timeout=90, env={"OPENBLAS_NUM_THREADS": "1", "NCCL_STUB_DIR": str(tmp_path)}, code=0)
