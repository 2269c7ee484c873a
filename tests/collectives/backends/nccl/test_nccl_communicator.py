"""Every call of the communicator over the stub: results, errors, groups, limits and aborts."""

from __future__ import annotations

import pytest

from tests.collectives.backends.nccl.conftest import RunRanks


@pytest.mark.parametrize("blocking", ["0", "1"])
@pytest.mark.parametrize("minor", [18, 32])
def test_wrong_arguments_are_named_and_groups_ended(run_ranks: RunRanks, minor: int, blocking: str) -> None:
    """What every collective computes is tested on arrays, over the same library: `backends/device/test_stub.py`."""
    run_ranks(2, "wrong_arguments", minor=minor, NCCL_COMM_BLOCKING=blocking)


def test_counts_beyond_31_bits_arrive_whole(run_ranks: RunRanks) -> None:
    run_ranks(2, "huge_count", NCCL_STUB_DRY="1")


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("ncclCommInitRankConfig", 2),
        ("ncclAllReduce", 8),
        ("ncclBroadcast", 99),
        ("ncclGroupEnd", 6),
        ("ncclCommGetAsyncError", 3),
    ],
)
def test_a_call_that_fails_is_named_with_nccls_own_words(run_ranks: RunRanks, function: str, code: int) -> None:
    names = {
        2: "ncclSystemError",
        3: "ncclInternalError",
        6: "ncclRemoteError",
        8: "ncclTimeout",
        99: "an error of the",
    }
    culprit = (
        rf"rank \d of 2: {function} returned {code} \({names[code]}.*NCCL says: {function} fails as the stub was told"
    )
    run_ranks(2, "told_to_fail", NCCL_STUB_FAIL=f"{function}:1:{code}", CULPRIT=culprit)


@pytest.mark.parametrize("function", ["ncclCommFinalize", "ncclCommDestroy"])
def test_a_close_that_fails_leaves_nothing(run_ranks: RunRanks, function: str) -> None:
    run_ranks(2, "close_fails", NCCL_STUB_FAIL=f"{function}:1:3")


def test_a_rank_that_never_comes_ends_the_meeting_at_its_limit(run_ranks: RunRanks) -> None:
    run_ranks(3, "never_comes")


def test_a_call_that_never_finishes_ends_at_its_limit(run_ranks: RunRanks) -> None:
    run_ranks(2, "hangs_in_a_call", NCCL_STUB_HANG="ncclAllReduce")


def test_an_abort_frees_a_call_that_is_stuck(run_ranks: RunRanks) -> None:
    run_ranks(2, "abort_frees_a_stuck_call", NCCL_STUB_HANG="ncclAllReduce")


def test_an_abort_waits_for_a_group_to_end(run_ranks: RunRanks) -> None:
    run_ranks(2, "abort_in_a_group")


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_a_close_that_others_do_not_join_ends_at_its_limit(run_ranks: RunRanks, blocking: str) -> None:
    run_ranks(3, "lonely_close", NCCL_COMM_BLOCKING=blocking)


def test_threads_that_call_nccl_are_on_the_device_of_their_rank(run_ranks: RunRanks) -> None:
    run_ranks(2, "threads_enter_their_device")


def test_an_abort_that_hangs_is_left_behind(run_ranks: RunRanks) -> None:
    run_ranks(2, "abort_hangs", NCCL_STUB_HANG="ncclCommAbort")
