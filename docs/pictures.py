"""Draws what jobs really print and do: `python docs/pictures.py [train] [failures] [step]`, all three by default.

Run it on an idle machine, in an environment that has `.[mpich,examples,bench]`. Lines are folded between words, at 110
columns at most.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from diagrams import save

ROOT = Path(__file__).parent.parent
COLUMNS, HEIGHT, WIDTH = 110, 19, 7.83  # columns; px of a line and of a character
TRAIN = "ddp-launch -n 2 examples/train_digits.py"
FAILURES = ("ddp-launch -n 2 killed.py", "ddp-launch -n 2 different.py 2>&1 | tail -n 6")
SCRIPTS = {
    "killed.py": """import os, signal
import numpy as np, collectives

comm = collectives.init()
for step in range(1000):
    if comm.rank == 1 and step == 100:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(1000))
""",
    "different.py": """import numpy as np, collectives

comm = collectives.init()
loss = np.ones(1, np.float32)
if comm.rank == 0:
    comm.broadcast(loss, root=0)
comm.all_reduce(loss)
""",
    "overlap.py": """import numpy as np
import collectives, ddp
from ddp import nn
from ddp.nn import functional as F

comm = collectives.init()
layers = [each for _ in range(6) for each in (nn.Linear(1024, 1024), nn.ReLU())]
model = ddp.DataParallel(nn.Sequential(*layers), bucket_cap_mb=8)
optimizer = ddp.optim.SGD(model.parameters(), lr=0.01)
rng = np.random.default_rng(comm.rank)
for step in range(30):
    x, t = rng.normal(size=(512, 1024)).astype(np.float32), rng.integers(0, 1024, 512)
    loss = F.cross_entropy(model(ddp.from_numpy(x)), ddp.from_numpy(t))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
}


def lines_of(command: str, folder: str | Path) -> list[str]:
    """The command after a prompt, and what it prints; of a line that is written over, what stays."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, shell=True, cwd=folder, env=environ, timeout=300, check=False, **pipes)
    text = done.stdout.decode(errors="replace").replace("\r\n", "\n")
    printed = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    folded = [part for line in printed for part in textwrap.wrap(line, COLUMNS, replace_whitespace=False) or [""]]
    return [f"$ {command}", *folded]


def draw(name: str, label: str, lines: Sequence[str]) -> None:
    """A terminal with these lines."""
    style = 'font-family="ui-monospace, SFMono-Regular, Menlo, monospace" font-size="13" xml:space="preserve"'
    parts = []
    for at, line in enumerate(lines):
        color = "t" if line.startswith("$") else "s"
        parts.append(f'<text class="{color}" {style} x="16" y="{28 + HEIGHT * at}">{escape(line)}</text>')
    save(name, label, 32 + WIDTH * COLUMNS, 32 + HEIGHT * len(lines), parts)


def train(folder: str) -> None:
    draw("train", "ddp-launch trains a network on two ranks", lines_of(TRAIN, ROOT))


def failures(folder: str) -> None:
    lines = [line for command in FAILURES for line in ("", *lines_of(command, folder))][1:]
    draw("failures", "What ddp-launch says of a rank that was killed, and of ranks that make different calls", lines)


def step(folder: str) -> None:
    print(lines_of("ddp-launch -n 2 --trace trace overlap.py", folder)[-1])
    shutil.copy(Path(folder, "trace", "step.png"), ROOT / "docs" / "step.png")


def main() -> None:
    made = {each.__name__: each for each in (train, failures, step)}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            Path(folder, name).write_text(text)
        for name in sys.argv[1:] or made:
            made[name](folder)


if __name__ == "__main__":
    main()
