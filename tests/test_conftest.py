"""What the summary of a run says of skipped tests."""

from __future__ import annotations

from tests.conftest import describe_skips


def test_the_summary_says_what_skipped_tests_need_and_how_to_run_them() -> None:
    reasons = [
        "Skipped: PyTorch is the oracle here",
        "Skipped: could not import 'torch': No module named 'torch'",
        "Skipped: CuPy is not installed",
        "Skipped: NVRTC is not installed",
        "Skipped: could not import 'safetensors.numpy': No module named 'safetensors'",
        "Skipped: takes Open MPI",
    ]
    assert describe_skips(reasons) == (
        "6 skipped, a file that needs something as a whole counted once. Missing: PyTorch and safetensors (3), "
        "a GPU and its libraries (1), NVRTC (1), something else: -rs says what (1). "
        "4 of them run after: pip install -e '.[oracle,nvrtc]'"
    )
    assert "run after" not in describe_skips(["Skipped: there is no GPU"])
