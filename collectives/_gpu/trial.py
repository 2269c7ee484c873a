"""A process that hands its MPI GPU memory, for `probe`: `python -m collectives._gpu.trial DEVICE SECONDS`."""

from __future__ import annotations

import faulthandler
import sys
from typing import Any

import numpy as np

from collectives._gpu import cuda
from collectives._gpu.probe import PROVEN

_COUNTS = (2048, 1 << 20)  # bytes: an MPI sends short messages in another way than long ones


def arrives(gpu: cuda.Cuda, MPI: Any) -> bool:
    """Sends this process GPU memory from itself; True if it has arrived unchanged."""
    for count in _COUNTS:
        numbers = (np.arange(count) % 251).astype(np.uint8)
        with gpu.on(gpu.stream()):
            sent, came = gpu.xp.asarray(numbers), gpu.xp.asarray(np.full(count, 255, np.uint8))
            sent.get()  # both are there
            came.get()
            receive = MPI.COMM_SELF.Irecv([came, MPI.BYTE], 0, 0)
            send = MPI.COMM_SELF.Isend([sent, MPI.BYTE], 0, 0)
            receive.Wait()
            send.Wait()
            if not np.array_equal(came.get(), numbers):
                return False
    return True


def main() -> None:
    device, limit = int(sys.argv[1]), float(sys.argv[2])
    faulthandler.dump_traceback_later(limit, exit=True)  # whoever started it may be gone
    gpu = cuda.load(device)
    with gpu.on(gpu.stream()):  # some MPIs take the device that is current when they start
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    arrived = arrives(gpu, MPI)
    MPI.Finalize()
    print(PROVEN if arrived else "other bytes arrived than were sent")


if __name__ == "__main__":
    main()
