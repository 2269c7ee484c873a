"""A record read by the file descriptor that is known already."""

from __future__ import annotations

from collectives.flight.reader import Window
from collectives.flight.report import FlightRecord


def read_fd(pid: int, fd: int) -> FlightRecord:
    """What process `pid`, which has its record open as `fd`, has done so far."""
    with Window.of_fd(pid, fd) as window:
        return window.read()
