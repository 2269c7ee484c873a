"""Checks of GPUs: the driver through nvidia-smi, CuPy through a kernel that it runs, NCCL and cuDNN.

A missing GPU is no error: ranks train on the CPU then.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from launcher.doctor.findings import Finding, error, install, note, ok, pip, warning
from launcher.doctor.machine import version
from launcher.doctor.probes import Answer, run_probe

# Seconds that a probe may take: CuPy compiles a kernel, and an idle GPU may have to wake up.
_LIMIT = 60.0
_SMI = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]
# The packages that CuPy comes in.
_CUPY_PACKAGES = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
# What to install for each CUDA series, as in the extras of setup.cfg.
CUPY = {12: "cupy-cuda12x>=14.0", 13: "cupy-cuda13x>=14.0"}
NCCL = {12: ("nvidia-nccl-cu12>=2.19", "pynccl>=0.1.2"), 13: ("nvidia-nccl-cu13>=2.27", "pynccl>=0.1.2")}
CUDNN = {
    12: ("nvidia-cudnn-frontend==1.26.*", "nvidia-cudnn-cu12>=9.10"),
    13: ("nvidia-cudnn-frontend==1.26.*", "nvidia-cudnn-cu13>=9.12"),
}
# The first driver for CUDA 13.
_CUDA13_DRIVER = 580
_ON_CPU = "ranks train on the CPU"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus(NamedTuple):
    """Facts about the GPUs.

    cards: nvidia-smi's row of each GPU: name, memory, compute capability, driver; failure: why nvidia-smi failed
    cupys: the installed packages of CuPy; cupy, nccl: answers of the probes. cupy is None if CuPy is missing, and nccl
    is None if the probe of CuPy has no answer
    cudnn: the version of its Python frontend, "" if that is not installed; hidden: the value of CUDA_VISIBLE_DEVICES
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
        """How many ranks can use NCCL here: the number of GPUs, 0 if CuPy or NCCL does not work."""
        works = self.cupy and self.cupy.value and not self.cupy.value["failure"] and self.nccl and self.nccl.value
        return self.cupy.value["devices"] if self.cupy and works else 0


@functools.cache
def probe() -> Gpus:
    """Gathers the facts."""
    cards, failure = _cards()
    cupys = tuple(filter(version, _CUPY_PACKAGES))
    cupy = run_probe("cupy", limit=_LIMIT) if cupys else None
    nccl = run_probe("nccl", limit=_LIMIT) if cupy and cupy.value else None
    return Gpus(cards, failure, cupys, cupy, nccl, version("nvidia-cudnn-frontend"), os.environ.get(_VISIBLE))


def check() -> Iterator[Finding]:
    """Checks GPUs and their libraries."""
    return evaluate(probe())


def evaluate(facts: Gpus) -> Iterator[Finding]:
    """The findings that follow from the facts."""
    cupy_answers = facts.cupy is not None and facts.cupy.value is not None
    if facts.failure:
        fix = "sudo reboot  # after an update of the driver; without one: sudo apt install nvidia-driver"
        yield warning(f"nvidia-smi fails: {facts.failure}: {_ON_CPU}", fix)
    for index, (name, memory, capability, driver) in enumerate(facts.cards):
        yield ok(f"GPU {index}: {name}, {memory}, compute capability {capability}, driver {driver}")
    if cupy_answers:
        yield from _libraries(facts)
    elif not facts.cards:
        if not facts.failure:
            yield note(f"no NVIDIA GPU is seen here: {_ON_CPU}")
    elif not facts.cupys:
        series = _series(facts)
        packages = install(CUPY[series], *NCCL[series], *CUDNN[series])
        yield warning(f"CuPy is not installed, so the GPU is not used: {_ON_CPU}", packages)
    elif facts.hidden is not None:
        text = f"CuPy sees no GPU, with {_VISIBLE}={facts.hidden!r}: {_ON_CPU}"
        yield note(text, f"unset {_VISIBLE}")
    else:
        yield from _libraries(facts)


def _libraries(facts: Gpus) -> Iterator[Finding]:
    assert facts.cupy is not None
    series = _series(facts)
    cupy = facts.cupy.value
    replace = f"{pip('uninstall', '-y', *facts.cupys)} && {install(CUPY[series])}"
    if cupy is None or cupy["failure"]:
        yield error(f"CuPy ({', '.join(facts.cupys)}) does not work: {facts.cupy.reason or cupy['failure']}", replace)
    else:
        driver, runtime = (f"{cuda // 1000}.{cuda % 1000 // 10}" for cuda in (cupy["driver"], cupy["runtime"]))
        yield ok(f"CuPy {cupy['version']} (CUDA {runtime}; the driver serves {driver}) computes on the GPU")
        if not facts.cudnn:
            text = "cuDNN is not installed: convolution and attention are computed by slower array formulas"
            yield warning(text, install(*CUDNN[series]))
    if facts.nccl is not None and facts.nccl.value is not None:
        yield ok(f"NCCL {facts.nccl.value['version']} ({facts.nccl.value['path']})")
    elif facts.nccl is not None:
        text = f"arrays on GPUs go through MPI and the host's memory, which is slower: {facts.nccl.reason}"
        yield warning(text, install(*NCCL[series]))


def _series(facts: Gpus) -> int:
    """The CUDA series, 12 or 13, whose packages the driver can run."""
    if facts.cupy is not None and facts.cupy.value is not None:
        return 13 if facts.cupy.value["driver"] >= 13000 else 12
    return 13 if facts.cards and int(facts.cards[0][3].partition(".")[0]) >= _CUDA13_DRIVER else 12


def _cards() -> tuple[tuple[tuple[str, ...], ...], str]:
    """The rows of nvidia-smi, and why it failed; both are empty where there is no nvidia-smi."""
    try:
        smi = subprocess.run(_SMI, capture_output=True, text=True, timeout=_LIMIT)
    except FileNotFoundError:
        return (), ""
    except (OSError, subprocess.TimeoutExpired) as failure:
        return (), str(failure)
    rows = smi.stdout.strip().splitlines()
    if smi.returncode:
        return (), (rows or smi.stderr.strip().splitlines() or [f"exit status {smi.returncode}"])[-1]
    return tuple(tuple(row.split(", ")) for row in rows if ", " in row), ""
