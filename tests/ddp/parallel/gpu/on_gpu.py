"""One rank on a real GPU: `python on_gpu.py BACKEND TRANSPORT`, under an engine or alone. Ranks may share the GPU."""

from __future__ import annotations

import functools
import sys
from typing import Any

import cupy
from numpy.testing import assert_allclose

import collectives
from tests.ddp.parallel.gpu.training import WAYS, train, train_layers

DEVICE = "cuda:0"
SEEDS = 12


def main() -> None:
    backend, over = sys.argv[1:]
    comm: Any = collectives.init(backend, timeout=60)
    if comm.size > 1:
        comm.all_reduce(cupy.ones(4))
        assert comm._device_communicator._device_transport.name == over
    for way, options in WAYS.items():
        for seed in range(2 if way else SEEDS):
            with_stream(seed % 2 == 1, functools.partial(same, comm, train, seed, **options))
        say(comm, f"{way or 'all-reduce'}: the numbers of the CPU")
    same(comm, train_layers, 0)
    say(comm, "layers: the numbers of the CPU")
    print(f"rank {comm.rank}: gradients kept")


def with_stream(own: bool, run: Any) -> None:
    """Runs it on the default stream, or on one of its own, which the default stream does not wait for."""
    if not own:
        run()
        return
    with cupy.cuda.Stream(non_blocking=True) as stream:
        run()
    stream.synchronize()


def same(comm: Any, program: Any, seed: int, **options: Any) -> None:
    """The program gives the numbers that as many ranks give on the CPU."""
    got = program(comm, DEVICE, seed, **options)
    expected = collectives.run_threads(lambda cpu: program(cpu, "cpu", seed, **options), comm.size)[comm.rank]
    assert got.keys() == expected.keys()
    for name in expected:
        assert_allclose(got[name], expected[name], rtol=1e-7, atol=1e-9, err_msg=f"{name}, seed {seed}")


def say(comm: Any, what: str) -> None:
    if comm.rank == 0:
        print(what, flush=True)


if __name__ == "__main__":
    main()
