"""A rank of a job in which the last rank does FAULT where the others make one more call of COLLECTIVE.

rank.py FAULT COLLECTIVE
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import collectives
from collectives import MismatchError

FAULT, NAME = sys.argv[1:]
TAKES = {
    "all_reduce": ("x", "op"),
    "reduce": ("x", "op", "root"),
    "broadcast": ("x", "root"),
    "gather": ("x", "root"),
    "scatter": ("x", "root"),
    "all_gather": ("x",),
    "reduce_scatter": ("x", "op"),
    "barrier": (),
}


def call(name=NAME, shape=(4, 3), dtype=np.float32, op="sum", root=0):
    given = {"x": np.ones(shape, dtype), "op": op, "root": root}
    getattr(comm, name)(*(given[each] for each in TAKES[name]))


def sleeps():
    time.sleep(600)


def stops():
    while True:  # whoever lets it go on
        os.kill(os.getpid(), signal.SIGSTOP)


def raises():
    raise ValueError("a fault of the user's")


FAULTS = {
    "skips": lambda: None,
    "same call elsewhere": lambda: getattr(comm, NAME)(*([np.ones((4, 3), np.float32)] if TAKES[NAME] else [])),
    "other branch": lambda: call("barrier" if NAME != "barrier" else "all_reduce"),
    "wrong shape": lambda: call(shape=(4, 5)),
    "wrong dtype": lambda: call(dtype=np.float64),
    "wrong op": lambda: call(op="max"),
    "wrong root": lambda: call(root=1),
    "sleeps": sleeps,
    "stops": stops,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": raises,
    "exits 0": lambda: sys.exit(0),
    "vanishes": lambda: os._exit(0),
    "exits 3": lambda: sys.exit(3),
}

comm = collectives.init(timeout=30)  # starting may take long on a loaded machine
comm.timeout = 3
for _ in range(3):
    call()
try:
    if comm.rank == comm.size - 1:
        print(f"at {time.time()}", flush=True)
        FAULTS[FAULT]()
    else:
        call()
except MismatchError:
    comm.barrier()  # passed only if every rank has been told, and the communicator goes on
    raise
if FAULT != "skips":
    call()
    assert comm.all_reduce(np.array(1)) == comm.size
