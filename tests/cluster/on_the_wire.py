"""A job that says in one line what its collectives put on the wire, as JSON: name → the bytes that each rank sent.

Arrays are of 4 MiB, in the sense of the table in docs/collectives.md: the longest array that the collective knows.
"""

import json
from pathlib import Path

import numpy as np

import collectives

NBYTES = 4 << 20
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

comm = collectives.init(timeout=60)
whole = np.ones(NBYTES // 4, np.float32)
part = np.ones(NBYTES // 4 // comm.size, np.float32)
calls = {
    "all_reduce": lambda: comm.all_reduce(whole),
    "reduce": lambda: comm.reduce(whole),
    "reduce_scatter": lambda: comm.reduce_scatter(whole),
    "broadcast": lambda: comm.broadcast(whole),
    "gather": lambda: comm.gather(part),
    "all_gather": lambda: comm.all_gather(part),
    "scatter": lambda: comm.scatter(whole),
    "all_to_all": lambda: comm.all_to_all(whole),
    "send": lambda: comm.send(whole, 1) if comm.rank == 0 else comm.recv(0),
    "barrier": lambda: comm.barrier(),
}
sent = {}
for name, call in calls.items():
    comm.barrier()
    before = int(SENT.read_text())
    call()
    comm.barrier()
    sent[name] = comm.all_gather_object(int(SENT.read_text()) - before)
if comm.rank == 0:
    print(json.dumps(sent), flush=True)
