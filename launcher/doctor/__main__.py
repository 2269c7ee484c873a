"""`ddp-doctor`, and `python -m launcher.doctor` for places where the command is not on PATH."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    # What a check has started ends with this process, which must not die without a word to it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from launcher.doctor import cli

    try:
        return cli.main(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
