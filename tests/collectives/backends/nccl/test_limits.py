"""Calls with a time limit, in threads that may be left behind."""

from __future__ import annotations

import threading

import pytest

from collectives.backends.nccl.limits import StillRunning, run_within


def test_in_time_and_too_late() -> None:
    release = threading.Event()
    assert run_within(20, lambda: 3, "three") == 3
    with pytest.raises(ZeroDivisionError):
        run_within(20, lambda: 1 // 0, "one")
    with pytest.raises(StillRunning, match="late"):
        run_within(0.05, release.wait, "late")
    release.set()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("can't create new thread at interpreter shutdown", StillRunning),  # from Python 3.12 on
        ("can't start new thread", RuntimeError),  # the process has too many
    ],
)
def test_where_no_thread_starts(words: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(kind, match=words):
        run_within(20, lambda: 3, "three")
