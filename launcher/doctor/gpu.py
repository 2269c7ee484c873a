"""GPUs: the driver, CuPy, NCCL and cuDNN.

Nothing of it is an error on a machine without a GPU: there ranks train on the CPU.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from launcher.doctor.findings import Finding, Level, error, install, note, ok, pip, warning
from launcher.doctor.machine import in_container, size, version
from launcher.doctor.probes import Answer, ask
from launcher.linux import read_text

CHECK = "gpu"
_LIMIT = 60.0  # s; CuPy compiles a kernel, and a GPU that slept wakes up
_CUPYS = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
_BINDINGS = ("pynccl", "nccl4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_EXCLUSIVE_THREAD, _PROHIBITED, _EXCLUSIVE_PROCESS = 1, 2, 3
_HIDDEN = "CUDA_VISIBLE_DEVICES"


class Gpus(NamedTuple):
    """Facts.

    cards: NVIDIA's, seen on the machine's bus; module: version of the kernel's driver, "" if it is not loaded
    library: libcuda is there; cupys, bindings: packages of these kinds, and their versions
    visible: CUDA_VISIBLE_DEVICES, None if it is not set; container: this is one
    cudnn: version of its Python frontend, "" if that is not installed
    """

    cards: int
    module: str
    library: bool
    cupys: dict[str, str]
    bindings: dict[str, str]
    visible: str | None = None
    container: bool = False
    cudnn: str = ""


class Answers(NamedTuple):
    """What processes said that were asked: None where it made no sense to ask."""

    driver: Answer | None = None
    cupy: Answer | None = None
    nccl: Answer | None = None


def look() -> Gpus:
    """What there is."""
    return Gpus(
        cards=_cards(),
        module=_module(),
        library=_library(),
        cupys={name: found for name in _CUPYS if (found := version(name))},
        bindings={name: found for name in _BINDINGS if (found := version(name))},
        visible=os.environ.get(_HIDDEN),
        container=in_container(),
        cudnn=version("nvidia-cudnn-frontend"),
    )


def inquire(facts: Gpus) -> Answers:
    """Asks whom there is reason to ask."""
    driver = ask("launcher.doctor.probes", "cuda", limit=_LIMIT) if facts.library else None
    if driver is None or driver.value is None or not driver.value["devices"] or not facts.cupys:
        return Answers(driver)
    return Answers(
        driver,
        ask("launcher.doctor.probes", "cupy", limit=_LIMIT),
        ask("launcher.doctor.probes", "nccl", limit=_LIMIT),
    )


def devices(answers: Answers) -> int:
    """How many GPUs the driver gives."""
    return len(answers.driver.value["devices"]) if answers.driver and answers.driver.value else 0


def nccl_ranks(answers: Answers) -> int:
    """How many ranks could speak through NCCL here; 0 where CuPy or NCCL does not work."""
    works = answers.cupy is not None and answers.cupy.value is not None and not answers.cupy.value["trouble"]
    found = answers.nccl is not None and answers.nccl.value is not None and answers.nccl.value["found"]
    return devices(answers) if works and found else 0


def judge(facts: Gpus, answers: Answers) -> list[Finding]:
    """What follows."""
    found = [*_driver(facts, answers.driver)]
    if not devices(answers):
        return found
    assert answers.driver is not None
    cuda = int(answers.driver.value["version"])
    found += _cupy(facts, answers.cupy, cuda)
    if found[-1].level is Level.OK and not facts.cudnn:
        text = "cuDNN is not installed: convolution and attention are computed by slower array formulas"
        found.append(warning(CHECK, text, install(*_cudnn(cuda))))
    if answers.nccl is not None:
        found += _nccl(facts, answers.nccl, cuda)
    return found


def _driver(facts: Gpus, answer: Answer | None) -> list[Finding]:
    if answer is None:
        if facts.cards or facts.module:
            fix = "docker run --gpus all ..." if facts.container else "sudo apt install nvidia-driver"
            text = "an NVIDIA GPU is here, but not its driver (libcuda.so.1): ranks train on the CPU"
            return [warning(CHECK, text, fix)]
        besides = f" ({', '.join(f'{name} {found}' for name, found in facts.cupys.items())} has nothing to do)"
        return [note(CHECK, "no NVIDIA GPU is seen here: ranks train on the CPU" + (besides if facts.cupys else ""))]
    if answer.value is None:
        return [error(CHECK, f"CUDA's driver cannot be asked: {answer.reason}", "nvidia-smi")]
    serves = f"CUDA's driver serves CUDA {_dotted(answer.value['version'])}"
    if facts.module:
        serves += f" (kernel module {facts.module})"
    if answer.value["refusal"] or not answer.value["devices"]:
        refusal = answer.value["refusal"] or "there are none"
        if facts.visible is not None:
            text = f"no GPU can be used ({refusal}), with {_HIDDEN}={facts.visible!r}: ranks train on the CPU"
            return [note(CHECK, text, f"unset {_HIDDEN}")]
        if not facts.cards and not facts.module:
            return [note(CHECK, f"{serves}, but no GPU is seen here ({refusal}): ranks train on the CPU")]
        fix = "sudo reboot  # after an update of the driver" if "803" in refusal or "804" in refusal else "nvidia-smi"
        return [error(CHECK, f"{serves}, but gives no GPU: {refusal}", fix)]
    found = [ok(CHECK, serves)]
    for index, device in enumerate(answer.value["devices"]):
        text = f"GPU {index}: {device['name']}, {size(device['memory'])}, compute capability {device['capability']}"
        default = f"sudo nvidia-smi -i {index} -c DEFAULT"
        if device["mode"] == _PROHIBITED:
            found.append(error(CHECK, f"{text}, but its compute mode forbids computing", default))
        elif device["mode"] in (_EXCLUSIVE_THREAD, _EXCLUSIVE_PROCESS):
            found.append(note(CHECK, f"{text}; one process at a time may use it, so --share-gpu fails", default))
        else:
            found.append(ok(CHECK, text))
    return found


def _cupy(facts: Gpus, answer: Answer | None, cuda: int) -> list[Finding]:
    right = f"cupy-cuda{_series(cuda)}x"
    if len(facts.cupys) > 1:
        names = ", ".join(facts.cupys)
        text = f"several CuPy packages in one environment ({names}) overwrite each other"
        return [error(CHECK, text, f"{pip('uninstall', '-y', *facts.cupys)} && {install(right)}")]
    if not facts.cupys:
        text = "CuPy is not installed, so the GPU is not used: ranks train on the CPU"
        return [warning(CHECK, text, install(right, f"nvidia-nccl-cu{_series(cuda)}", "pynccl", *_cudnn(cuda)))]
    assert answer is not None
    ((name, have),) = facts.cupys.items()
    if answer.value is None or answer.value["trouble"]:
        why = answer.reason or answer.value["trouble"]
        fix = install("--force-reinstall", right)
        if name not in (right, "cupy"):
            fix = f"{pip('uninstall', '-y', name)} && {install(right)}"
        return [error(CHECK, f"{name} {have} does not work with this driver (CUDA {_dotted(cuda)}): {why}", fix)]
    return [
        ok(CHECK, f"{name} {answer.value['version']} (CUDA {_dotted(answer.value['runtime'])}) computes on the GPU")
    ]


def _cudnn(cuda: int) -> tuple[str, str]:
    """The packages of cuDNN, as the extras have them."""
    return "nvidia-cudnn-frontend==1.26.*", f"nvidia-cudnn-cu{_series(cuda)}"


def _nccl(facts: Gpus, answer: Answer, cuda: int) -> list[Finding]:
    fix = install(f"nvidia-nccl-cu{_series(cuda)}", "pynccl")
    over = "arrays on GPUs go through MPI and the host's memory, which is slower"
    if answer.value is None:
        return [warning(CHECK, f"NCCL cannot be loaded ({answer.reason}): {over}", fix)]
    found, failed = answer.value["found"], answer.value["failed"]
    if not found:
        why = "; ".join(f"{source}: {reason}" for source, reason in failed.items())
        return [warning(CHECK, f"NCCL is not found: {over} ({why})", fix)]
    source, (number, path) = next(iter(found.items()))
    through = {"pynccl": "pynccl", "cupy": "CuPy", "path": "its own file"}[source]
    bindings = ", ".join(f"{name} {have}" for name, have in facts.bindings.items())
    result = [ok(CHECK, f"NCCL {number} ({path}) by {through}" + (f"; installed: {bindings}" if bindings else ""))]
    several = {tuple(each) for each in found.values()}
    if len(several) > 1:
        listed = ", ".join(f"{number} ({path})" for number, path in sorted(several))
        result.append(note(CHECK, f"there are several NCCLs: {listed}; the first above is used"))
    return result


def _series(cuda: int) -> int:
    """The series of packages that goes with a driver: 12 or 13."""
    return 13 if cuda >= 13000 else 12


def _dotted(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _library() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _module() -> str:
    words = read_text("/proc/driver/nvidia/version").partition("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "loaded" if words else "")


def _cards() -> int:
    """NVIDIA's display and 3D controllers on the PCI bus."""
    found = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:  # unplugged meanwhile, or hidden
            continue
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found
