"""Runs a script on ranks that are forked from one process, which has imported PyTorch: to import it takes each seconds.

They find each other as torchrun's do: by variables, and a store that who starts them keeps.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# What scripts import, and what DistributedDataParallel imports when it is made.
CONTEXT.set_forkserver_preload(["torch._dynamo", "collectives.torch", __name__])


def run_forked(script: Path, size: int = 2, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """The output of all ranks, and the code of the first that failed.

    The others are killed as soon as one fails; all are after `timeout` seconds, and then err shows where they stood.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
    }
    outputs = [script.with_suffix(suffix) for suffix in (".out", ".err")]
    for output in outputs:
        output.touch()
    ranks = []
    for rank in range(size):
        environ = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(CONTEXT.Process(target=_run, args=(script, environ, outputs, 0.9 * timeout)))
        ranks[-1].start()
    end = time.monotonic() + timeout
    running = {rank.sentinel: rank for rank in ranks}
    while running and time.monotonic() < end and not any(rank.exitcode for rank in ranks):
        for ended in wait(list(running), end - time.monotonic()):
            running.pop(ended).join()
    code = next((rank.exitcode for rank in ranks if rank.exitcode), -1 if running else 0)
    for rank in running.values():
        rank.kill()
        rank.join()
    out, err = (output.read_text() for output in outputs)
    return subprocess.CompletedProcess([str(script)], code, out, err)


def _run(script: Path, environ: dict[str, str], outputs: Sequence[Path], limit: float) -> None:
    os.environ.update(environ)
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
    faulthandler.dump_traceback_later(limit)
    exec(compile(script.read_text(), script, "exec"), {"__name__": "__main__"})
