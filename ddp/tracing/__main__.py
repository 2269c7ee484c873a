"""`python -m ddp.tracing DIR`: merges the parts that the ranks have written to a folder."""

from __future__ import annotations

import sys

from ddp.errors import ArgumentError
from ddp.tracing import merge


def main(args: list[str]) -> int:
    """Runs the command. Returns its exit code: 0; 1 if the parts cannot be merged; 2 for wrong arguments."""
    if len(args) != 1 or args[0].startswith("-"):
        print("usage: python -m ddp.tracing DIR    merges the parts of a trace in DIR", file=sys.stderr)
        return 2
    try:
        print(merge(args[0]))
    except (ArgumentError, OSError) as error:
        print(f"ddp.tracing: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
