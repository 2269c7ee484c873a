"""A terminal whose keys go one by one to an editor of lines that runs in a rank: history, completion, arrows.

Ctrl-C and Ctrl-Z stay the launcher's, and what the rank prints is printed as ever: only that keys are gathered into
lines, and shown, by the terminal itself is switched off meanwhile.
"""

from __future__ import annotations

import termios
from typing import Any


def one_by_one(modes: list[Any]) -> list[Any]:
    """Modes of a terminal, as `termios.tcgetattr` has them, in which keys come one by one and are not shown."""
    changed = [*modes[:6], [*modes[6]]]
    changed[3] &= ~(termios.ICANON | termios.ECHO)
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    return changed


class Keys:
    """The modes of one terminal, switched and restored."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._modes: list[Any] | None = None  # of before

    @property
    def on(self) -> bool:
        """Keys come one by one."""
        return self._modes is not None

    def switch(self, on: bool) -> None:
        """Has keys come one by one, or as whole lines again, in exactly the modes of before."""
        if on == self.on:
            return
        try:
            if on:
                self._modes = termios.tcgetattr(self._fd)
                changed = one_by_one(self._modes)
            else:
                assert self._modes is not None
                changed, self._modes = self._modes, None
            termios.tcsetattr(self._fd, termios.TCSANOW, changed)  # now: a terminal that Ctrl-S holds drains nothing
        except termios.error:
            self._modes = None  # it has gone
