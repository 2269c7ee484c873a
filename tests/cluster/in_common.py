"""A job that says in one line what its ranks have in common, as JSON: [rank, node, the segments it maps] of each."""

import json
import re
from pathlib import Path

import collectives

comm = collectives.init(timeout=30)
mine = comm.empty(1000)
mine[:] = comm.rank + 1
assert comm.all_reduce(mine, out=mine)[0] == sum(range(comm.size + 1))
maps = Path("/proc/self/maps").read_text()
segments = sorted(set(re.findall(r"(\d+)\s+/memfd:ddp-shared", maps)))
told = comm.gather_object([comm.rank, comm.node, segments])
if comm.rank == 0:
    print(json.dumps(told), flush=True)
