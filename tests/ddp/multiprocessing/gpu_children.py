"""What processes with a stand-in for the GPU run; a new interpreter finds it by import."""

from __future__ import annotations

import time
from typing import Any

import pytest

import ddp
from tests.gpu.between import Between
from tests.gpu.installing import Gpu


def standin() -> Gpu:
    """A GPU for this process."""
    patch = pytest.MonkeyPatch()
    gpu = Gpu(patch)
    Between(gpu, patch)
    return gpu


def answer(requests: Any, results: Any, real: bool = False) -> None:
    """Adds one to what comes, in place, and says what it has seen, until None comes."""
    if not real:
        standin()
    while (x := requests.get()) is not None:
        seen = str(x.device), x.stride(), x.requires_grad, x.tolist()
        with ddp.no_grad():
            x += 1
        if real:
            ddp.cuda.synchronize()  # the parent looks next
        del x
        results.put(seen)


def give_back(requests: Any, results: Any) -> None:
    """Sends what comes home again, whole and a part; and a part into a pipe, if one comes next."""
    standin()
    x = requests.get()
    results.put(x)
    results.put(x[1:3])
    if (other := requests.get()) is not None:
        other.send(x[1:3])
        time.sleep(60)


def hear(requests: Any, results: Any) -> None:
    """Adds one to what comes from a pipe that comes first."""
    standin()
    x = requests.get().recv()
    seen = x.tolist()
    x += 1
    results.put(seen)


def keep(requests: Any, results: Any) -> None:
    """Looks at what comes for ever."""
    standin()
    kept = requests.get()
    results.put(kept.numel())
    time.sleep(60)
