"""GPUs: the driver by nvidia-smi; CuPy, by a kernel that it runs; NCCL and cuDNN.

Nothing of it is an error on a machine without a GPU: there ranks train on the CPU.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from launcher.doctor.findings import Finding, error, install, note, ok, pip, warning
from launcher.doctor.machine import version
from launcher.doctor.probes import Answer, ask

_LIMIT = 60.0  # s; CuPy compiles a kernel, and a GPU that slept wakes up
_SMI = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]
_CUPYS = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
_CUDA13 = 580  # the first driver that serves CUDA 13
_ON_CPU = "ranks train on the CPU"
_HIDDEN = "CUDA_VISIBLE_DEVICES"


class Gpus(NamedTuple):
    """Facts.

    cards: nvidia-smi's row of each GPU: name, memory, compute capability, driver; failure: why none
    cupys: installed packages of CuPy; cupy, nccl: answers of the probes, None if there is no CuPy
    cudnn: version of its Python frontend, "" if that is not installed; hidden: value of CUDA_VISIBLE_DEVICES
    """

    cards: tuple[tuple[str, ...], ...] = ()
    failure: str = ""
    cupys: tuple[str, ...] = ()
    cupy: Answer | None = None
    nccl: Answer | None = None
    cudnn: str = ""
    hidden: str | None = None

    @property
    def nccl_ranks(self) -> int:
        """How many ranks can use NCCL here; 0 where CuPy or NCCL does not work."""
        works = self.cupy and self.cupy.value and not self.cupy.value["failure"] and self.nccl and self.nccl.value
        return self.cupy.value["devices"] if self.cupy and works else 0


@functools.cache
def look() -> Gpus:
    """What there is."""
    cards, failure = _cards()
    cupys = tuple(filter(version, _CUPYS))
    cupy = ask("cupy", limit=_LIMIT) if cupys else None
    nccl = ask("nccl", limit=_LIMIT) if cupy and cupy.value else None
    return Gpus(cards, failure, cupys, cupy, nccl, version("nvidia-cudnn-frontend"), os.environ.get(_HIDDEN))


def check() -> Iterator[Finding]:
    """Looks and judges."""
    return judge(look())


def judge(facts: Gpus) -> Iterator[Finding]:
    """What follows."""
    works = facts.cupy is not None and facts.cupy.value is not None
    if facts.failure:
        fix = "sudo reboot  # after an update of the driver; without one: sudo apt install nvidia-driver"
        yield warning(f"nvidia-smi fails: {facts.failure}: {_ON_CPU}", fix)
    for index, (name, memory, capability, driver) in enumerate(facts.cards):
        yield ok(f"GPU {index}: {name}, {memory}, compute capability {capability}, driver {driver}")
    if works:
        yield from _libraries(facts)
    elif not facts.cards:
        if not facts.failure:
            yield note(f"no NVIDIA GPU is seen here: {_ON_CPU}")
    elif not facts.cupys:
        series = _series(facts)
        packages = (f"cupy-cuda{series}x", f"nvidia-nccl-cu{series}", "pynccl", *_cudnn(series))
        yield warning(f"CuPy is not installed, so the GPU is not used: {_ON_CPU}", install(*packages))
    elif facts.hidden is not None:
        text = f"CuPy sees no GPU, with {_HIDDEN}={facts.hidden!r}: {_ON_CPU}"
        yield note(text, f"unset {_HIDDEN}")
    else:
        yield from _libraries(facts)


def _libraries(facts: Gpus) -> Iterator[Finding]:
    assert facts.cupy is not None
    series, found = _series(facts), facts.cupy.value
    right = f"cupy-cuda{series}x"
    replace = f"{pip('uninstall', '-y', *facts.cupys)} && {install(right)}"
    if found is None or found["failure"]:
        yield error(f"CuPy ({', '.join(facts.cupys)}) does not work: {facts.cupy.reason or found['failure']}", replace)
    else:
        driver, runtime = (f"{cuda // 1000}.{cuda % 1000 // 10}" for cuda in (found["driver"], found["runtime"]))
        yield ok(f"CuPy {found['version']} (CUDA {runtime}; the driver serves {driver}) computes on the GPU")
        if not facts.cudnn:
            text = "cuDNN is not installed: convolution and attention are computed by slower array formulas"
            yield warning(text, install(*_cudnn(series)))
    if facts.nccl is not None and facts.nccl.value is not None:
        yield ok(f"NCCL {facts.nccl.value['version']} ({facts.nccl.value['path']})")
    elif facts.nccl is not None:
        text = f"arrays on GPUs go through MPI and the host's memory, which is slower: {facts.nccl.reason}"
        yield warning(text, install(f"nvidia-nccl-cu{series}", "pynccl"))


def _cudnn(series: int) -> tuple[str, str]:
    """The packages of cuDNN, as the extras have them."""
    return "nvidia-cudnn-frontend==1.26.*", f"nvidia-cudnn-cu{series}"


def _series(facts: Gpus) -> int:
    """The series of packages that goes with the driver: 12 or 13."""
    if facts.cupy is not None and facts.cupy.value is not None:
        return 13 if facts.cupy.value["driver"] >= 13000 else 12
    return 13 if facts.cards and int(facts.cards[0][3].partition(".")[0]) >= _CUDA13 else 12


def _cards() -> tuple[tuple[tuple[str, ...], ...], str]:
    """The rows of nvidia-smi, and why it fails; neither where there is none."""
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_LIMIT)
    except FileNotFoundError:
        return (), ""
    except (OSError, subprocess.TimeoutExpired) as failure:
        return (), str(failure)
    rows = done.stdout.strip().splitlines()
    if done.returncode:
        return (), (rows or done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return tuple(tuple(row.split(", ")) for row in rows if ", " in row), ""
