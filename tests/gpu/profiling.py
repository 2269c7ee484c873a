"""`cupy.cuda.nvtx`: what a profiler would show, with CuPy's arguments."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Nvtx(ModuleType):
    """The module. shown: what it was told, in order"""

    available = True

    def __init__(self) -> None:
        super().__init__("cupy.cuda.nvtx")
        self.shown: list[tuple[Any, ...]] = []
        self._begun = 0

    def Mark(self, message: str, id_color: int = -1) -> None:
        self.shown.append(("mark", message.encode()))

    def RangePush(self, message: str, id_color: int = -1) -> None:
        self.shown.append(("push", message.encode()))

    def RangePop(self) -> None:
        self.shown.append(("pop",))

    def RangeStart(self, message: str | None, color: int | None) -> int:
        self._begun += 1
        self.shown.append(("start", message and message.encode(), color))
        return self._begun

    def RangeEnd(self, range_id: int) -> None:
        self.shown.append(("end", range_id))
