"""A console that keeps what the launcher prints."""

from __future__ import annotations

from collections.abc import Callable

import pytest


class FakeConsole:
    """Keeps the launcher's own lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.reporter: Callable[[str], None] = lambda text: None

    def say(self, text: str, quoted: str = "") -> None:
        text = f"ddp-launch: {text}"
        self.lines.append(text)
        self.reporter(text)


@pytest.fixture
def console() -> FakeConsole:
    return FakeConsole()
