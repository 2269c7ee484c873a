"""The command `ddp-launch`. If it is not on PATH, `python -m launcher` runs it, too."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command. Returns: its exit code"""
    # Until ranks run, Ctrl-C ends this process at once and without a traceback.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from launcher import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
