"""All checks, in the order in which they are shown: those that are quick at the same time, then the ranks, alone."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from launcher.doctor import findings as report
from launcher.doctor.findings import Finding, Level, exit_code, note, verdict, warning
from launcher.doctor.probes import end_all
from launcher.network import Host

Check = Callable[[], list[Finding]]


def checkup(*, hosts: str | None, hostfile: str | None, as_json: bool) -> int:
    """Makes all checks and prints what they found; returns the exit code.

    hosts, hostfile: the machines that are to train together, as ddp-launch takes them; None: this one
    Raises: UsageError if these are not understood.
    """
    machines = _hosts(hosts, hostfile)
    start = time.monotonic()
    colour = report.coloured()
    found: list[Finding] = []
    if not as_json:
        from collectives.version import __version__

        print(f"ddp-doctor {__version__} on {platform.node()}, {platform.system()} {platform.release()}\n", flush=True)
    for findings in _all(machines):
        if not as_json:
            print("\n".join(report.lines(findings, colour, found[-1].check if found else "")), flush=True)
        found += findings
    sentence = verdict(found, "this machine" if not machines else "these hosts")
    seconds = time.monotonic() - start
    if as_json:
        print(json.dumps(report.document(found, sentence, seconds), indent=1))
    else:
        print(f"\n{sentence} ({seconds:.1f} s)")
    sys.stdout.flush()
    return exit_code(found)


def _all(machines: tuple[Host, ...]) -> Iterator[list[Finding]]:
    from launcher.doctor import gpu, machine, mpi

    facts = gpu.look()
    found: list[Finding] = []
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)) + 1) as pool:
        inquiry = pool.submit(gpu.inquire, facts)
        quick: list[tuple[str, Check]] = [
            ("python", machine.python),
            ("threads", machine.threads),
            ("mpi", mpi.check),
            ("memory", machine.memory),
            ("limits", machine.limits),
            ("gpu", lambda: gpu.judge(facts, inquiry.result())),
        ]
        if machines:
            from launcher.doctor import hosts

            quick.append(("hosts", lambda: hosts.check(machines)))
        try:
            for each in [pool.submit(_guarded, name, check) for name, check in quick]:
                findings = each.result()
                found += findings
                if findings:
                    yield findings
            gpus = 0 if inquiry.exception() else gpu.nccl_ranks(inquiry.result())
        except BaseException:  # Ctrl-C, or the reader has gone: the pool would wait for its checks
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise
    yield from _ranks(found, gpus, machines)


def _ranks(found: list[Finding], gpus: int, machines: tuple[Host, ...]) -> Iterator[list[Finding]]:
    from launcher.doctor import mpi, ranks
    from launcher.doctor.ranks import trials
    from launcher.engines import slurm

    broken = {each.check for each in found if each.level is Level.ERROR}
    starters = mpi.look()
    tasks = (slurm.tasks(os.environ) or 0) if starters.srun else 0
    tries = trials(broken, mpiexec=bool(starters.family), tasks=tasks, gpus=gpus, hosts=machines)
    if not tries:
        yield [note(ranks.CHECK, "none were started" + (": fix the errors above first" if broken else ""))]
    warned = any(each.level is Level.WARNING for each in found)
    for trial in tries:
        tried = _guarded(ranks.CHECK, partial(ranks.check, trial))
        if exit_code(tried) and warned:
            tried.append(note(ranks.CHECK, "one of the warnings above may be why"))
        yield tried


def _guarded(name: str, check: Check) -> list[Finding]:
    """A check that fails by itself says nothing of the machine, and the others are worth having."""
    try:
        return check()
    except Exception as failure:
        return [warning(name, f"this check failed by itself: {type(failure).__name__}: {failure}")]


def _hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    from launcher.network import parse_hosts, read_hostfile

    if hosts is not None:
        return parse_hosts(hosts)
    return () if hostfile is None else read_hostfile(hostfile)
