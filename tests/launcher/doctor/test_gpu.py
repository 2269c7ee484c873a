"""GPUs that are made up: no test here has seen one. What the doctor makes of what drivers, CuPy and NCCL may say."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.doctor import gpu
from launcher.doctor.findings import install, pip
from launcher.doctor.probes import Answer, ask

CPU = gpu.Gpus(cards=0, module="", library=False, cupys={}, bindings={})
BOX = gpu.Gpus(
    cards=2,
    module="550.54.15",
    library=True,
    cupys={"cupy-cuda12x": "14.2.0"},
    bindings={"pynccl": "0.1.2", "nvidia-nccl-cu12": "2.30.4"},
    cudnn="1.26.0",
)
H100 = {"name": "NVIDIA H100", "memory": 80 << 30, "capability": "9.0", "mode": 0}


def driver(*devices: dict[str, Any], refusal: str = "", version: int = 12080) -> Answer:
    return Answer({"version": version, "refusal": refusal, "devices": list(devices)}, "")


def cupy(trouble: str = "") -> Answer:
    return Answer({"version": "14.2.0", "runtime": 12090, "trouble": trouble}, "")


def nccl(**found: list[str]) -> Answer:
    failed = {source: "OSError: no libnccl.so.2" for source in ("pynccl", "cupy", "path") if source not in found}
    return Answer({"found": found, "failed": failed}, "")


WHEEL = ["2.30.4", "/v/nvidia/nccl/lib/libnccl.so.2"]
SERVES = "ok CUDA's driver serves CUDA 12.8 (kernel module 550.54.15)"
ONE = "ok GPU 0: NVIDIA H100, 80.0 GiB, compute capability 9.0"
COMPUTES = "ok cupy-cuda12x 14.2.0 (CUDA 12.9) computes on the GPU"
HAS_NCCL = f"ok NCCL 2.30.4 ({WHEEL[1]}) by pynccl; installed: pynccl 0.1.2, nvidia-nccl-cu12 2.30.4"
REMOVE = f"{pip('uninstall', '-y', 'cupy-cuda12x', 'cupy')} && {install('cupy-cuda12x')}"
REPLACE = f"{pip('uninstall', '-y', 'cupy-cuda13x')} && {install('cupy-cuda12x')}"
CUPY12 = ("cupy-cuda12x", "nvidia-nccl-cu12", "pynccl")


@pytest.mark.parametrize(
    ("facts", "answers", "expected"),
    [
        (CPU, gpu.Answers(), ["note no NVIDIA GPU is seen here: ranks train on the CPU"]),
        (CPU._replace(cupys={"cupy-cuda12x": "14.2.0"}), gpu.Answers(), ["note (cupy-cuda12x 14.2.0 has"]),
        # A card without a driver, on a machine and in a container.
        (CPU._replace(cards=1), gpu.Answers(), ["warning not its driver -> sudo apt install"]),
        (CPU._replace(module="550", container=True), gpu.Answers(), ["warning not its driver -> docker run --gpus"]),
        # A driver that gives no GPU: broken, hidden by the user, updated without a reboot, of an image on a laptop.
        (BOX, gpu.Answers(Answer(None, "died of SIGSEGV")), ["error cannot be asked: died of -> nvidia-smi"]),
        (BOX, gpu.Answers(driver(refusal="CUDA_ERROR_UNKNOWN (999)")), ["error no GPU: CUDA_ERROR_UN -> nvidia-smi"]),
        (
            BOX._replace(visible=""),
            gpu.Answers(driver(refusal="CUDA_ERROR_NO_DEVICE (100)")),
            ["note with CUDA_VISIBLE_DEVICES='': ranks train on the CPU -> unset CUDA_VISIBLE_DEVICES"],
        ),
        (
            BOX,
            gpu.Answers(driver(refusal="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)")),
            ["error gives no GPU: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803) -> sudo reboot"],
        ),
        (
            BOX._replace(cards=0, module=""),
            gpu.Answers(driver(refusal="CUDA_ERROR_NO_DEVICE (100)")),
            ["note no GPU is seen here (CUDA_ERROR_NO_DEVICE (100))"],
        ),
        # All as it should be.
        (BOX, gpu.Answers(driver(H100), cupy(), nccl(pynccl=WHEEL)), [SERVES, ONE, COMPUTES, HAS_NCCL]),
        (
            BOX._replace(bindings={}),
            gpu.Answers(driver(H100), cupy(), nccl(cupy=["2.20.5", "/usr/lib/libnccl.so.2"])),
            [SERVES, ONE, COMPUTES, "ok NCCL 2.20.5 (/usr/lib/libnccl.so.2) by CuPy"],
        ),
        # Compute modes.
        (
            BOX,
            gpu.Answers(driver({**H100, "mode": 3}, {**H100, "mode": 2}), cupy(), nccl(pynccl=WHEEL)),
            [
                SERVES,
                "note one process at a time may use it, so --share-gpu fails -> sudo nvidia-smi -i 0 -c DEFAULT",
                "error its compute mode forbids computing -> sudo nvidia-smi -i 1 -c DEFAULT",
                COMPUTES,
                HAS_NCCL,
            ],
        ),
        # CuPy: none, several, one of another CUDA, one that computes wrong.
        (
            BOX._replace(cupys={}),
            gpu.Answers(driver(H100)),
            [SERVES, ONE, f"warning CuPy is not installed -> {install(*CUPY12)}"],
        ),
        (
            BOX._replace(cupys={}),
            gpu.Answers(driver(H100, version=13000)),
            ["ok serves CUDA 13.0", ONE, "warning CuPy is not -> cupy-cuda13x nvidia-nccl-cu13 pynccl"],
        ),
        (
            BOX._replace(cupys={"cupy-cuda12x": "14.2.0", "cupy": "13.0.0"}),
            gpu.Answers(driver(H100), cupy()),
            [SERVES, ONE, f"error several CuPy packages in one environment (cupy-cuda12x, cupy) -> {REMOVE}"],
        ),
        (
            BOX._replace(cupys={"cupy-cuda13x": "14.2.0"}),
            gpu.Answers(driver(H100), Answer(None, "cudaErrorInsufficientDriver")),
            [
                SERVES,
                ONE,
                f"error cupy-cuda13x 14.2.0 does not work with this driver (CUDA 12.8): cudaErrorIns -> {REPLACE}",
            ],
        ),
        (
            BOX,
            gpu.Answers(driver(H100), cupy("a sum on the GPU is 3 instead of 999000")),
            [SERVES, ONE, f"error a sum on the GPU is 3 -> {install('--force-reinstall', 'cupy-cuda12x')}"],
        ),
        (
            BOX._replace(cudnn=""),
            gpu.Answers(driver(H100), cupy(), nccl(pynccl=WHEEL)),
            [SERVES, ONE, COMPUTES, "warning cuDNN is not installed -> nvidia-cudnn-cu12", HAS_NCCL],
        ),
        # NCCL: none, crashing, two.
        (
            BOX,
            gpu.Answers(driver(H100), cupy(), nccl()),
            [SERVES, ONE, COMPUTES, "warning NCCL is not found -> nvidia-nccl-cu12 pynccl"],
        ),
        (
            BOX,
            gpu.Answers(driver(H100), cupy(), Answer(None, "died")),
            [SERVES, ONE, COMPUTES, "warning NCCL cannot be loaded (died) -> nvidia-nccl-cu12 pynccl"],
        ),
        (
            BOX,
            gpu.Answers(driver(H100), cupy(), nccl(pynccl=WHEEL, cupy=["2.20.5", "/x"], path=WHEEL)),
            [SERVES, ONE, COMPUTES, HAS_NCCL, "note 2.20.5 (/x), 2.30.4 (/v/"],
        ),
    ],
)
def test_gpus(facts: gpu.Gpus, answers: gpu.Answers, expected: list[str], assert_found: Any) -> None:
    assert_found(gpu.judge(facts, answers), *expected)


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        (gpu.Answers(driver(H100, H100), cupy(), nccl(pynccl=WHEEL)), 2),
        (gpu.Answers(driver(H100, H100), cupy(), nccl()), 0),
        (gpu.Answers(driver(H100, H100), cupy("wrong"), nccl(pynccl=WHEEL)), 0),
        (gpu.Answers(driver(H100, H100), Answer(None, "died"), Answer(None, "died")), 0),
        (gpu.Answers(), 0),
    ],
)
def test_how_many_could_speak_through_nccl(answers: gpu.Answers, count: int) -> None:
    assert gpu.nccl_ranks(answers) == count


def test_nobody_is_asked_where_there_is_no_driver() -> None:
    assert gpu.inquire(CPU) == gpu.Answers()


def test_what_nccl_says_where_it_is_not_installed() -> None:
    answer = ask("launcher.doctor.probes", "nccl", limit=30)
    assert answer.value is not None, answer
    assert {*answer.value["found"], *answer.value["failed"]} == {"pynccl", "cupy", "path"}
    assert all(answer.value["failed"].values())


def test_a_library_that_is_no_driver(tmp_path: Any) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    answer = ask("launcher.doctor.probes", "cuda", limit=30, environ={"LD_LIBRARY_PATH": str(tmp_path)})
    assert answer.value is None
    assert "libcuda.so.1" in answer.reason
