"""What a rank finds changed in its process once it has joined MPI's world."""

from __future__ import annotations

import pytest

from tests.conftest import Run

# What Python does not know of, as faulthandler's handlers, counts too. A handler is the first word of a sigaction.
# An MPI does not know who connects to it: what a stranger sends must not run code, so that nothing is unpickled.
JOIN = """
import ctypes, faulthandler, os, pickle, signal, sys
import collectives

def dispositions():
    action = ctypes.create_string_buffer(512)
    found = {}
    for number in signal.valid_signals():
        ctypes.CDLL(None).sigaction(number, None, action)
        found[int(number)] = action.raw[:8]
    return found

def loads(data):
    raise AssertionError("unpickled")

pickle.loads = loads  # which MPI takes when it is loaded
received = []
signal.signal(signal.SIGHUP, lambda number, frame: received.append(number))
faulthandler.register(signal.SIGUSR1)
before = dispositions()
comm = collectives.init("mpi")
after = dispositions()
os.kill(os.getpid(), signal.SIGHUP)
from mpi4py import MPI
try:
    MPI.pickle.loads(pickle.dumps(1))
    sys.exit("MPI has another pickle")
except AssertionError:
    pass
assert received == [signal.SIGHUP]
assert [number for number in before if after[number] != before[number]] == []
if comm.rank == 0:  # lines of several ranks come torn
    print(comm.size, comm.local_size)
"""


@pytest.mark.mpi
def test_ranks_join_without_pickles_and_signals_stay_the_users(run_script: Run) -> None:
    done = run_script(JOIN, 2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 2\n", "")
