"""All checks, in the order in which they are made and shown."""

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
    """Makes all checks and prints their findings; returns the exit code.

    machines: those that are to train together; empty: this one
    """
    start = time.monotonic()
    findings: list[Finding] = []
    checks: dict[str, Check] = {
        "python": machine.python,
        "threads": machine.threads,
        "mpi": mpi.check,
        "memory": machine.memory,
        "limits": machine.limits,
        "gpu": gpu.check,
        "ranks": lambda: ranks.check(findings, machines),
    }
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not as_json:
        from collectives import __version__

        print(f"ddp-doctor {__version__} on {platform.node()}, {platform.system()} {platform.release()}\n", flush=True)
    bar = partial(progress_bar, total=len(checks), bar_format="{l_bar}{bar}| {n}/{total}", leave=False)
    shows = columns() and machine.version("tqdm")  # if tqdm is missing, the check of Python reports it
    for done, (name, check) in enumerate(checks.items()):
        with bar(desc=name, initial=done) if shows else nullcontext():
            new = run(name, check)
        findings += new
        if new and not as_json:
            print("\n".join(lines(new, colour)), flush=True)
    sentence = verdict(findings, "these hosts" if machines else "this machine")
    seconds = time.monotonic() - start
    print(json.dumps(document(findings, sentence, seconds), indent=1) if as_json else f"\n{sentence} ({seconds:.1f} s)")
    return 1 if count(findings, "error") else 0


def run(name: str, check: Check) -> list[Finding]:
    """The findings of a check. If the check itself raises, that is a warning, and the other checks go on."""
    findings = []
    try:
        for finding in check():
            findings.append(finding if finding.check else finding._replace(check=name))
    except Exception as failure:
        findings.append(warning(f"this check failed by itself: {type(failure).__name__}: {failure}", check=name))
    return findings
