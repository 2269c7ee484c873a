"""The list of all checks, in the order in which they are made and shown."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

from collectives.progress_bar import columns, progress_bar
from launcher.doctor import gpu, machine, mpi, ranks
from launcher.doctor.findings import Finding, count, document, lines, verdict, warning
from launcher.network import Host

Check = Callable[[], Iterable[Finding]]


def checkup(machines: tuple[Host, ...], as_json: bool) -> int:
    """Makes all checks and prints what they found; returns the exit code.

    machines: that are to train together; none: this one
    """
    start = time.monotonic()
    found: list[Finding] = []
    checks: dict[str, Check] = {
        "python": machine.python,
        "threads": machine.threads,
        "mpi": mpi.check,
        "memory": machine.memory,
        "limits": machine.limits,
        "gpu": gpu.check,
        "ranks": lambda: ranks.check(found, machines),
    }
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not as_json:
        from collectives import __version__

        print(f"ddp-doctor {__version__} on {platform.node()}, {platform.system()} {platform.release()}\n", flush=True)
    bar = partial(progress_bar, total=len(checks), bar_format="{l_bar}{bar}| {n}/{total}", leave=False)
    shows = columns() and machine.version("tqdm")  # one that is not installed is a finding
    for done, (name, check) in enumerate(checks.items()):
        with bar(desc=name, initial=done) if shows else nullcontext():
            findings = run(name, check)
        found += findings
        if findings and not as_json:
            print("\n".join(lines(findings, colour)), flush=True)
    sentence, seconds = verdict(found, "these hosts" if machines else "this machine"), time.monotonic() - start
    print(json.dumps(document(found, sentence, seconds), indent=1) if as_json else f"\n{sentence} ({seconds:.1f} s)")
    return 1 if count(found, "error") else 0


def run(name: str, check: Check) -> list[Finding]:
    """What a check finds. One that fails by itself says nothing about the machine: the others are still made."""
    found = []
    try:
        for finding in check():
            found.append(finding if finding.check else finding._replace(check=name))
    except Exception as failure:
        found.append(warning(f"this check failed by itself: {type(failure).__name__}: {failure}", check=name))
    return found
