"""One rank on a real GPU: `python on_gpu.py BACKEND CARRIER`, under an engine or alone."""

from __future__ import annotations

import sys

import cupy

import collectives
from tests.collectives.gpu import bodies


def main() -> None:
    backend, carrier = sys.argv[1:]
    comm = collectives.init(backend, timeout=60)
    bodies.contract(comm, cupy)
    assert comm._door is not None
    assert comm._door._carrier is not None
    assert comm._door._carrier.name == carrier
    bodies.overlap(comm, cupy)
    if carrier == "NCCL":
        bodies.capture(comm, cupy)
    print(f"rank {comm.rank}: contract kept")


if __name__ == "__main__":
    main()
