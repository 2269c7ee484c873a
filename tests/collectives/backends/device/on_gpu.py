"""One rank on a real GPU: `python on_gpu.py BACKEND TRANSPORT`, under an engine or alone."""

from __future__ import annotations

import sys

import cupy

import collectives
from tests.collectives.backends.device import bodies


def main() -> None:
    backend, transport = sys.argv[1:]
    comm = collectives.init(backend, timeout=60)
    bodies.contract(comm, cupy)
    assert comm._device_communicator is not None
    assert comm._device_communicator._device_transport is not None
    assert comm._device_communicator._device_transport.name == transport
    bodies.overlap(comm, cupy)
    if transport == "NCCL":
        bodies.capture(comm, cupy)
    print(f"rank {comm.rank}: contract kept")


if __name__ == "__main__":
    main()
