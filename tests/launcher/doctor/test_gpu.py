"""GPUs that are made up: what the doctor makes of what nvidia-smi, CuPy and NCCL may say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import gpu
from launcher.doctor.findings import install
from launcher.doctor.gpu import Gpus
from launcher.doctor.probes import Answer
from tests.conftest import ROOT, executable

H100 = ("NVIDIA H100", "81559 MiB", "9.0", "550.54.15")
CUPY = {"version": "14.2.0", "driver": 12080, "runtime": 12090, "devices": 2, "failure": ""}
NCCL = Answer({"version": "2.30.4", "path": "/v/libnccl.so.2"}, "")
DIED = Answer(None, "died of SIGSEGV")
BOX = Gpus(cards=(H100,), cupys=("cupy-cuda12x",), cupy=Answer(CUPY, ""), nccl=NCCL, cudnn="1.26.0")
BARE = BOX._replace(cupys=(), cupy=None, nccl=None)
ONE = "ok GPU 0: NVIDIA H100, 81559 MiB, compute capability 9.0, driver 550.54.15"
COMPUTES = "ok CuPy 14.2.0 (CUDA 12.9; the driver serves 12.8) computes on the GPU"
HAS_NCCL = "ok NCCL 2.30.4 (/v/libnccl.so.2)"
WRONG = Answer({**CUPY, "failure": "a sum on the GPU is 3 instead of 999000"}, "")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Gpus(), ["note no NVIDIA GPU is seen here: ranks train on the CPU"]),
        (Gpus(failure="version mismatch"), ["warning version mismatch: ranks train on the CPU -> sudo reboot"]),
        (BOX, [ONE, COMPUTES, HAS_NCCL]),
        (BOX._replace(cards=()), [COMPUTES, HAS_NCCL]),  # a container without nvidia-smi
        (BARE, [ONE, "warning CuPy is not installed -> 'cupy-cuda12x>=14.0' 'nvidia-nccl-cu12>=2.19' 'pynccl>="]),
        (
            BARE._replace(cards=((*H100[:3], "580.1"),)),
            ["ok 580.1", "warning CuPy -> 'cupy-cuda13x>=14.0' 'nvidia-nccl-cu13"],
        ),
        (BOX._replace(cupy=DIED, nccl=None, hidden=""), [ONE, "note CUDA_VISIBLE_DEVICES='' -> unset CUDA_VISIBLE"]),
        (BOX._replace(cupy=DIED, nccl=None), [ONE, f"error work: died of SIGSEGV -> {install('cupy-cuda12x>=14.0')}"]),
        (BOX._replace(cupy=WRONG), [ONE, "error a sum on the GPU is 3 -> cupy-cuda12x", HAS_NCCL]),
        (BOX._replace(cudnn=""), [ONE, COMPUTES, "warning cuDNN is not installed -> 'nvidia-cudnn-cu12>=9", HAS_NCCL]),
        (BOX._replace(nccl=DIED), [ONE, COMPUTES, "warning which is slower: died -> 'nvidia-nccl-cu12>=2.19' 'pynccl"]),
    ],
)
def test_gpus(facts: Gpus, expected: list[str], assert_found: Any) -> None:
    assert_found(gpu.evaluate(facts), *expected)


def test_packages_are_those_of_the_extras() -> None:
    text = (ROOT / "setup.cfg").read_text()
    for series in (12, 13):
        extra = text.partition(f"\ncuda{series} =\n")[2]
        packages = (gpu.CUPY[series], *gpu.NCCL[series], *gpu.CUDNN[series])
        assert all(f"    {package}\n" in extra for package in packages)


def test_how_many_ranks_can_use_nccl() -> None:
    without = (BOX._replace(nccl=DIED), BOX._replace(cupy=WRONG), BOX._replace(cupy=DIED, nccl=None), Gpus())
    assert [each.nccl_ranks for each in (BOX, *without)] == [2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("script", "cards", "failure"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 9.0, 550.54.15'", (H100,), ""),
        ("echo 'No devices were found'", (), ""),
        ("echo 'Failed to initialize NVML'; exit 9", (), "Failed to initialize NVML"),
        (None, (), ""),
    ],
)
def test_what_nvidia_smi_prints(script: str | None, cards: Any, failure: str, tmp_path: Path, monkeypatch: Any) -> None:
    if script is not None:
        executable(tmp_path / "nvidia-smi", f"#!/bin/sh\n{script}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu.probe.cache_clear()
    result = gpu.probe()
    gpu.probe.cache_clear()
    assert (result.cards, result.failure, result.hidden) == (cards, failure, os.environ.get("CUDA_VISIBLE_DEVICES"))
