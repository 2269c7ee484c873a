"""What a test wants to know of a GPU: what was launched, when the host waited, what memory was asked for."""

from __future__ import annotations

from collections import Counter


class Record:
    """Counts; `reset` begins anew."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all that was counted."""
        self.synchronizations: Counter[str] = Counter()
        self.waits: list[str] = []  # what waited
        self.launches: Counter[str] = Counter()
        self.copies_up = 0
        self.mallocs = 0
        self.frees = 0

    def wait(self, kind: str) -> None:
        """The host waits for the device."""
        self.synchronizations[kind] += 1
        self.waits.append(kind)
