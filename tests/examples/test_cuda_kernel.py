"""The example's own kernel: it compiles for the GPUs we know, runs on the stand-in, and says what it lacks here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import ddp
from tests.conftest import ROOT, Run
from tests.ddp.cuda import nvrtc

EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch: Any) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cuda_kernel

    yield cuda_kernel
    cuda_kernel.kernel.cache_clear()


@pytest.mark.skipif(nvrtc.LIBRARY is None or nvrtc.HEADERS is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_compiles(example: Any, dtype: str, architecture: str) -> None:
    ptx = nvrtc.compiled(example.text(dtype), (f"-arch={architecture}",))
    assert set(re.findall(r"\.entry (\w+)\(", ptx)) == {"swish", "swish_backward"}


class TestOnTheStandin:
    def test_the_whole(self, gpu: Any, example: Any, capsys: Any) -> None:
        assert example.main(["--steps", "20"]) == 0
        out = capsys.readouterr().out
        assert "gradients agree with finite differences" in out
        assert float(re.findall(r"squared error ([\d.e+-]+)", out)[0]) < 1

    def test_one_launch_each_way_and_no_wait(self, gpu: Any, example: Any) -> None:
        x = ddp.linspace(-3, 3, 1000, device="cuda").reshape(10, 100).T.requires_grad_()
        expected = x.detach() * ddp.sigmoid(1.5 * x.detach())
        gpu.reset()
        y = example.Swish.apply(x, 1.5)
        y.backward(ddp.ones_like(y))
        assert (gpu.launches["swish"], gpu.launches["swish_backward"]) == (1, 1)
        assert not gpu.synchronizations
        assert ddp.allclose(y, expected)
        assert example.Swish.apply(x[:0], 1.5).shape == (0, 10)


@pytest.mark.gpu
@pytest.mark.skipif(not ddp.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu(run_job: Run) -> None:
    done = run_job([sys.executable, str(EXAMPLES / "cuda_kernel.py")], code=0)
    assert float(re.findall(r"squared error ([\d.e+-]+)", done.stdout)[0]) < 1e-2
