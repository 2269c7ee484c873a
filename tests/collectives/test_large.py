"""More than 2 GiB in one call, on an MPI that counts in C's int and on one that does not. Takes about 15 GiB."""

from __future__ import annotations

import pytest

from tests.conftest import Run

SCRIPT = """
import numpy as np
import collectives
from collectives import Communicator

world = collectives.init(timeout=250)
twin = world.duplicate().transport
# By messages, whatever ranks of one node do else.
comm = Communicator(getattr(twin, "_inner", twin), 250, world.registry)
n = 2**31 + 24
x = np.full(n, comm.rank + 1, np.int8)
x[-1] = 10 * (comm.rank + 1)
assert comm.all_reduce(x, "max", out=x) is x
assert (x[0], x[-2], x[-1]) == (2, 2, 20)

x[:] = comm.rank
x[-1] = 7 + comm.rank
comm.broadcast(x, 1)
assert (x[0], x[-2], x[-1]) == (1, 1, 8)

half = comm.all_to_all(x, lengths="equal")
assert len(half) == n and half[n // 2 - 1] == (8 if comm.rank == 1 else 1)
del half

if comm.rank == 0:
    comm.send(x, 1)
else:
    comm.recv(0, out=x)

part = comm.scatter(x if comm.rank == 0 else None)
assert len(part) == n // 2
whole = comm.gather(part)
assert whole is None or (len(whole), whole[0], whole[-1]) == (n, 1, 8)
print("done", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(300)
def test_counts_beyond_an_int(run_script: Run) -> None:
    done = run_script(SCRIPT, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
