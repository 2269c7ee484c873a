"""How a keeper ends: as its rank did, for whoever watches the keeper, or at once, when nobody is left to tell."""

from __future__ import annotations

import os
import resource
import signal

from launcher.process import sweep

TYPE_CHECKING = False  # not of `typing`, whose import would cost a keeper a tenth of its memory
if TYPE_CHECKING:
    from typing import NoReturn

SWEEP_LIMIT = 2.0  # s


def end_like(code: int) -> NoReturn:
    """Ends this process with an exit code, or by a signal if `code` is minus its number."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank's core is the one of interest
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def end_at_once() -> NoReturn:
    """Ends everything below this process, and it."""
    sweep(SWEEP_LIMIT)
    os._exit(1)
