"""What a test wants to know of a GPU: what was launched, when the host waited and where, what memory was asked for."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = str(Path(__file__).parent.parent.parent)


class Record:
    """Counts; `reset` begins anew."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all that was counted."""
        self.synchronizations: Counter[str] = Counter()
        self.waits: list[tuple[str, str]] = []  # what waited, and our lines that led there
        self.launches: Counter[str] = Counter()
        self.copies_up = 0
        self.mallocs = 0
        self.frees = 0

    def wait(self, kind: str) -> None:
        """The host waits for the device."""
        self.synchronizations[kind] += 1
        self.waits.append((kind, here()))


def here() -> str:
    """The innermost lines of ours, the last one first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 5:
        name = frame.f_code.co_filename
        if (
            name.startswith(ROOT)
            and ("/tests/gpu/" not in name or "/test_" in name)
            and not (name.endswith("/_tensor/base.py") and frame.f_code.co_name in ("inner", "guarded_run"))
        ):
            found.append(f"{name[len(ROOT) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
