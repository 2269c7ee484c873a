"""The machines that ranks are started on."""

from __future__ import annotations

from typing import NamedTuple


class Host(NamedTuple):
    """A machine and how many ranks it takes."""

    name: str
    slots: int
