"""How a keeper ends: as its rank did, for whoever watches the keeper, or at once, when nobody is left to tell."""

from __future__ import annotations

import os
import resource
import signal
import time

from launcher.process import sweep

TYPE_CHECKING = False  # not of `typing`, whose import would cost a keeper a tenth of its memory
if TYPE_CHECKING:
    from typing import NoReturn

SWEEP_LIMIT = 2.0  # s
_BEGAN = time.time()  # the rank has hardly been forked when a keeper imports this


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
    # On another host than the launcher's nobody else does; the last keeper there finds what no rank holds any more.
    from launcher.leftovers import remove_leftovers

    remove_leftovers(_BEGAN)
    os._exit(1)
