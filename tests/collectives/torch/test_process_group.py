"""Every call of torch.distributed, and PyTorch's own wrappers and tests, on the backend "ddp"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from collectives.time_limit import Deadline
from tests.conftest import Run, has_mpich

pytest.importorskip("torch")

# Of PyTorch's own: of each kind one. What on_ranks.py has of its own is left to it.
SAMPLE = (
    "test_batch_isend_irecv_gloo",
    "test_ddp_sink_noclone",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
)
# What they want of gloo's own wording, and of its name in a log.
WORDING = (
    "test_barrier_timeout_arg",
    "test_barrier_timeout_full_group",
    "test_ddp_logging_data_cpu",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
)
# Their model is made for three names, of which "ddp" is none.
OTHER_NAMES = tuple(
    f"test_accumulate_gradients_no_sync{more}"
    for more in ("", "_allreduce_hook", "_allreduce_with_then_hook", "_grad_is_view")
)


def test_a_timeout_is_for_all_calls_of_a_work_together() -> None:
    from collectives.torch.work import TorchWork

    limits: list[Deadline] = []

    class Call:
        def wait(self, limit: Deadline) -> None:
            limits.append(limit)

    TorchWork([Call(), Call()], []).wait(timedelta(seconds=10))  # type: ignore[list-item]
    assert limits[0] is limits[1]
    assert limits[0].seconds == 10


@pytest.mark.mpi
def test_on_two_ranks(hold_over_mpi: Callable[..., None]) -> None:
    hold_over_mpi([Path(__file__).parent / "on_ranks.py"], "TestRanks", 2)


def run_pytorch_tests(run_job: Run, backend: str, names: tuple[str, ...], timeout: float) -> None:
    pytest.importorskip("expecttest", reason="expecttest is in the extra oracle")
    command = [sys.executable, "-W", "ignore", "-m", "tests.collectives.torch.pytorch_tests", "--backend", backend]
    command += names
    done = run_job(command, timeout=timeout)
    failed = [line for line in done.stdout.splitlines() if '"outcome": "failed"' in line]
    expected = WORDING if backend == "ddp as gloo" else (*WORDING, *OTHER_NAMES)
    unexpected = [line for line in failed if not any(f'"{name}"' in line for name in expected)]
    assert not unexpected, "\n".join(unexpected)
    assert "'passed': " in done.stdout, done.stdout + done.stderr


@pytest.mark.mpi
@pytest.mark.skipif(not has_mpich(), reason="takes MPICH")
def test_a_sample_of_pytorchs_own_tests(run_job: Run) -> None:
    run_pytorch_tests(run_job, "ddp as gloo", SAMPLE, 110)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_mpich(), reason="takes MPICH")
@pytest.mark.parametrize("backend", ["ddp as gloo", "ddp"])
def test_pytorchs_own_tests(backend: str, run_job: Run) -> None:
    run_pytorch_tests(run_job, backend, (), 1700)
