"""Where in the user's code a collective was called: `train.py:88` in an error saves an afternoon."""

from __future__ import annotations

import contextlib
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = tuple(os.path.join(_ROOT, package) + os.sep for package in ("collectives", "ddp"))
_PASSED = (*_OURS, contextlib.__file__)  # `with model.join():` calls from its end, through there


class CallSite:
    """A file and a line, put into words only when asked."""

    __slots__ = ("file", "line")

    def __init__(self, file: str, line: int) -> None:
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def user_site() -> CallSite:
    """The innermost caller outside our own packages, and not in a context manager of theirs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno)
