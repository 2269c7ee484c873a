"""A GPU without a GPU: a stand-in for the module `cupy`, whose arrays are not NumPy's, on simulated devices.

The fixture `gpu` (every test has it) puts the stand-in in the place of `cupy`, so that `ddp.tensor(x, device="cuda")`
simply works: two devices, streams, events, a memory pool, pinned memory, raw kernels through the emulator of
`tests/ddp/cuda`. What CuPy refuses, it refuses: implicit conversion to NumPy, NumPy operands, arrays of two devices in
one call, names that CuPy does not have (`names.txt`, which a test holds against the real one where it is installed).

    gpu.cupy              the module; gpu.machine: its streams (`tests.collectives.backends.device.machine.Machine`)
    gpu.synchronizations  Counter of the times that the host waited, by kind; gpu.waits: the kinds in their order
    gpu.launches          Counter of kernels and copies by name; gpu.copies_up: host arrays sent (they do not wait)
    gpu.mallocs, gpu.frees   of device memory beneath the pool
    gpu.reset()           forgets all counts
    gpu.launch(stream_pointer, kind, work)  work of a library's stand-in; it must not hold arrays, only addresses, so
                          that what is freed too early is found

`@pytest.mark.parametrize("gpu", simulated(count), indirect=True)` does the work later, in a
random order that CUDA allows; what is freed is scribbled over in both modes. In eager mode work is done at once.
A random generator draws other numbers than CuPy's; everything else has NumPy's values. `@on_both` runs a test on the
stand-in, and on a GPU of the machine under `pytest -m gpu`: of `gpu` it may use `cupy` alone.
"""

from __future__ import annotations

from typing import Any

import pytest

ALWAYS = 3  # simulated orders of a test that run without --long


def simulated(count: int) -> list[Any]:
    """Parameters for the fixture `gpu`: the seeds of `count` simulated orders, of which the first three run always."""
    return [
        pytest.param(("simulated", seed), id=f"seed {seed}", marks=[] if seed < ALWAYS else [pytest.mark.long])
        for seed in range(count)
    ]


#: On the stand-in, and on a GPU where there is one.
on_both = pytest.mark.parametrize("gpu", ["eager", pytest.param("real", marks=pytest.mark.gpu)], indirect=True)
