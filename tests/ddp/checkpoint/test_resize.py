"""`ddp-launch --resize` during training: more ranks and fewer end with the bits of one rank that was left alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.resize import resize
from tests.launcher.conftest import wait_for

PROGRAM = """
import hashlib, os, sys, time
import collectives, ddp
from ddp import nn
from ddp.nn import functional as F

folder, kind, pauses = sys.argv[1], sys.argv[2], (3, 10)
comm = collectives.init(timeout=30)

def train(name, pauses=()):
    ddp.manual_seed(3)
    data = ddp.data.TensorDataset(ddp.arange(48), ddp.randn(48, 6), ddp.randint(3, (48,)))
    loader = ddp.data.DataLoader(data, 2, sampler=ddp.data.DistributedSampler(data, seed=2, micro_batches=4))
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    model = ddp.DataParallel(net, micro_batches=4)
    adam = ddp.optim.AdamW(model.parameters(), lr=0.01)
    memory = "auto" if pauses else None
    ckpt = ddp.checkpoint.Checkpointer(
        f"{folder}/{name}", model=model, optimizer=adam, every=1000, memory_every=memory
    )
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
                if ckpt.step in pauses and comm.rank == 0:
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
        open(f"{folder}/{name}.sha256", "w").write(hashlib.sha256(state).hexdigest())

if not os.path.exists(f"{folder}/whole.sha256"):  # the first start, of one rank
    train("whole")
train("resized", pauses)
"""


@pytest.mark.mpi
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "restarts"),
    [
        pytest.param("loop", 1, id="from memory"),
        pytest.param("own", 0, id="from disk, a loop of one's own"),
        pytest.param("loop", 0, id="from disk", marks=pytest.mark.long),
        pytest.param("own", 1, id="from memory, a loop of one's own", marks=pytest.mark.long),
    ],
)
def test_more_ranks_and_fewer_end_with_the_same_bits(kind: str, restarts: int, start_job: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    options = ["-n", "1", "--max-restarts", str(restarts)]
    job = start_job(
        [sys.executable, "-m", "launcher", *options, script, tmp_path, kind],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    for n in (2, 1):
        wait_for(job.process.stdout, "there", 1, timeout=60)
        done, text = resize(job.process.pid, n)
        assert done, text
        kept = [name for name in os.listdir(tmp_path / "resized") if name.startswith("step-")]
        assert bool(kept) == (restarts == 0)
    ended = job.wait(60)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "resized.sha256").read_text() == (tmp_path / "whole.sha256").read_text()
