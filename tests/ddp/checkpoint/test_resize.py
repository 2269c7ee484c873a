"""`ddp-launch --resize` during training: more ranks and fewer end with the bits of one rank that was left alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.resize import resize
from tests.launcher.conftest import wait_for

PROGRAM = """
import hashlib, sys, time
import collectives, ddp
from ddp import nn
from ddp.nn import functional as F

folder, kind, pauses = sys.argv[1], sys.argv[2], list(map(int, sys.argv[3:]))
comm = collectives.init(timeout=30)
ddp.manual_seed(3)
data = ddp.data.TensorDataset(ddp.arange(48), ddp.randn(48, 6), ddp.randint(3, (48,)))
loader = ddp.data.DataLoader(data, 2, sampler=ddp.data.DistributedSampler(data, seed=2, micro_batches=4))
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
model = ddp.DataParallel(net, micro_batches=4)
adam = ddp.optim.AdamW(model.parameters(), lr=0.01)
ckpt = ddp.checkpoint.Checkpointer(f"{folder}/run", model=model, optimizer=adam, every=1000)
before = -1
with ckpt, ckpt.signals():
    if kind == "own":
        ckpt.load()
        while ckpt.step < 18:
            for each in range(4)[comm.rank * 4 // comm.size : (comm.rank + 1) * 4 // comm.size]:
                x = ddp.arange(12.0).reshape(2, 6) * 0.1 + each + ckpt.step
                F.mse_loss(model(x), ddp.ones(2, 3)).backward()
            adam.step()
            adam.zero_grad()
            ckpt.step += 1
            if ckpt.step in pauses:
                print("there", ckpt.step, comm.size, flush=True)
            time.sleep(0.1 if pauses else 0)
            if ckpt.stop_requested:
                ckpt.stop()
    else:
        for ids, x, t in ckpt.resume(loader, epochs=3):
            F.cross_entropy(model(x), t).backward()
            if model.accumulating:
                continue
            adam.step()
            adam.zero_grad()
            if ckpt.step in pauses and comm.rank == 0:
                print("there", ckpt.step, comm.size, flush=True)
            time.sleep(0.1 if pauses else 0)
state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
if comm.rank == 0:
    open(f"{folder}/sha256", "w").write(hashlib.sha256(state).hexdigest())
"""


@pytest.mark.mpi
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "restarts"),
    [("loop", 1), ("loop", 0), ("own", 1)],
    ids=["from memory", "from disk", "a loop of one's own"],
)
def test_more_ranks_and_fewer_end_with_the_same_bits(
    kind: str, restarts: int, run_job: Callable[..., Any], start_job: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)

    def command(folder: str, *pauses: int) -> list[str]:
        (tmp_path / folder).mkdir()
        words = ["-n", "1", "--max-restarts", restarts, script, tmp_path / folder, kind, *pauses]
        return [sys.executable, "-m", "launcher", *map(str, words)]

    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    assert run_job(command("whole"), timeout=60, env=environ).returncode == 0
    job = start_job(command("resized", 3, 10), env=environ)
    for n in (2, 1):
        wait_for(job.process.stdout, "there", 1)
        done, text = resize(job.process.pid, n)
        assert done, text
        kept = [name for name in os.listdir(tmp_path / "resized/run") if name.startswith("step-")]
        assert bool(kept) == (restarts == 0)
    ended = job.wait(60)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "resized/sha256").read_text() == (tmp_path / "whole/sha256").read_text()
