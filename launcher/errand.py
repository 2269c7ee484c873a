"""The launcher's process behind `launcher.run`: runs the ranks, and leaves in the call's folder how they ended."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Sequence

from launcher.called import VERDICT
from launcher.job import Job, UsageError
from launcher.judging.verdict import Fact, NotStarted, RankFailed, TimeLimit, cause
from launcher.process import become_subreaper, die_with_parent, sweep
from launcher.running.observer import Observer
from launcher.running.watch import launch

# The caller's wish to end is not worth a long farewell (s).
_GRACE = 2.0
_SWEEP_LIMIT = 1.0


def main(argv: Sequence[str]) -> int:
    """FOLDER PARENT NPROC LIMIT: of the call, the caller's pid, the number of ranks, seconds or nothing."""
    folder, parent, nproc, limit = argv[0], int(argv[1]), int(argv[2]), float(argv[3]) if argv[3] else None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it hands that down
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job's child ignores it, and could not be ended by it
    die_with_parent(parent, signal.SIGTERM)
    become_subreaper()
    listener = _Listener()
    try:
        job = Job(module="launcher.called", args=(folder,), n=nproc, timeout=limit, grace=_GRACE)
        code = launch(job, observers=[listener], explain=False)
        verdict = listener.verdict(code)
    except UsageError as error:
        code, verdict = 2, ("wrong use", None, str(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job is over, and so is this process, in a moment
        sweep(_SWEEP_LIMIT)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)  # nobody else will
    else:
        with open(os.path.join(folder, VERDICT), "wb") as file:
            pickle.dump(verdict, file)
    return code


class _Listener(Observer):
    """Hears what went wrong, and on which rank."""

    def __init__(self) -> None:
        self._facts: list[Fact] = []
        self._text = ""

    def failed(self, fact: Fact) -> None:
        self._facts.append(fact)

    def over(self, code: int, text: str) -> None:
        self._text = text

    def verdict(self, code: int) -> tuple[str, int | None, str]:
        """How it ended ("well", "late", "wrong use" or "failed"), the rank to blame if one is, and a sentence."""
        if code == 0:
            return "well", None, ""
        if not self._facts:
            return "failed", None, self._text or f"the launcher ended with code {code}"
        first = cause(self._facts)
        kind = "late" if isinstance(first, TimeLimit) else "failed"
        if isinstance(first, NotStarted) and first.code == 2:
            kind = "wrong use"
        return kind, first.rank if isinstance(first, RankFailed) else None, self._text or str(first)
