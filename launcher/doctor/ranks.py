"""The proof: ranks that ddp-launch starts, that call every collective, and whose results are compared."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.doctor.aside import Answer, ask
from launcher.doctor.finding import Finding, error, ok, warning
from launcher.hosts import Host

CHECK = "ranks"
_LIMIT = 90.0  # s; a few seconds on an idle machine
_SHOWN = 12  # lines of what went wrong


def command(n: int, backend: str, hosts: Sequence[Host] = ()) -> list[str]:
    """What follows `python -m launcher`."""
    where = ["--hosts", ",".join(f"{_bracketed(host.name)}:1" for host in hosts)] if hosts else []
    return ["-n", str(n), *where, "-m", "launcher.doctor.pair", backend, str(_LIMIT)]


def check(n: int = 2, backend: str = "mpi", hosts: Sequence[Host] = ()) -> list[Finding]:
    """Starts them and judges."""
    return judge(ask("launcher", *command(n, backend, hosts), limit=_LIMIT + 10), n, backend, hosts)


def judge(answer: Answer, n: int, backend: str, hosts: Sequence[Host] = ()) -> list[Finding]:
    """What follows from the ranks' results, or from what was printed instead."""
    where = f" on {', '.join(host.name for host in hosts)}" if hosts else ""
    through = "NCCL" if backend == "nccl" else "MPI" if hosts else "MPI and shared memory"
    who = f"{n} rank{'s' * (n != 1)}{where} over {through}"
    again = " ".join(["ddp-launch", *command(n, backend, hosts)])
    if answer.said is None:
        said = [line for line in answer.lines if line.startswith("ddp-launch: ")]
        # The launcher explains the failure in its last line; what came before it is the story.
        reason = said[-1].partition(": ")[2] if said else answer.trouble
        story = "".join(f"\n{line}" for line in answer.lines[-_SHOWN:] if line not in said[-1:])
        level = warning if backend == "nccl" else error  # without NCCL, arrays of a GPU go through the host's memory
        return [level(CHECK, f"{who} could not try the collectives: {reason}{story}\nto see it again: {again}")]
    seen = answer.said
    found = []
    if seen["wrong"]:
        for name, dtype, elements in seen["wrong"]:
            text = f"{name} of {dtype} gave {elements} wrong elements between {who}\nto see it again: {again}"
            found.append(error(CHECK, text))
    else:
        text = f"{who}: {seen['tried']} collectives give the right numbers in {seen['dtypes']} dtypes"
        found.append(ok(CHECK, text))
    if answer.status:
        found.append(warning(CHECK, f"{who} then ended with exit status {answer.status}: {''.join(answer.lines[-1:])}"))
    found += [warning(CHECK, text) for text in seen["refused"]]
    found += [ok("speed", line) for line in table(seen["timed"], n, seen["nodes"])]
    return found


def table(timed: Sequence[tuple[int, float]], n: int, nodes: int) -> list[str]:
    """A line for each size: bytes, microseconds, and GB/s (1e9 bytes) of the array reduced."""
    rows = [(_size(nbytes), f"{seconds * 1e6:.1f} us", _rate(nbytes, seconds)) for nbytes, seconds in timed]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    who = f"{n} rank{'s' * (n != 1)}" + (f" on {nodes} hosts" if nodes > 1 else "")
    lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"all_reduce ({who})  {line}" for line in lines]


def _size(nbytes: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def _rate(nbytes: int, seconds: float) -> str:
    """Of a few bytes there is only a latency."""
    return f"{nbytes / seconds / 1e9:.1f} GB/s" if nbytes >= 1 << 10 else ""


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name
