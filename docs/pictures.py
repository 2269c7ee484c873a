"""Draws what jobs really print and do: `python docs/pictures.py [train] [failures] [step] [recovery]`, all by default.

Run it on an idle machine, in an environment that has `.[mpich,examples,bench]`. Lines are folded between words, at 110
columns at most.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from diagrams import box, save, text

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
    # Each rank notes when it had come how far; the clock is the machine's, as that of --events.
    "recovery.py": """import os, signal, time
import collectives, ddp
from ddp import nn
from ddp.nn import functional as F

notes = []
note = lambda name: notes.append(f"{os.environ['DDP_ATTEMPT']} {name} {time.monotonic()}")
note("imported")
comm = collectives.init()
note("met")
ddp.manual_seed(1)
dataset = ddp.data.TensorDataset(ddp.randn(640, 64), ddp.randint(10, (640,)))
loader = ddp.data.DataLoader(dataset, batch_size=16, sampler=ddp.data.DistributedSampler(dataset))
model = ddp.DataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = ddp.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = ddp.checkpoint.Checkpointer("run", model=model, optimizer=optimizer, memory_every=1)
note("made")
for images, labels in ckpt.resume(loader, epochs=2):
    if len(notes) == 3:
        note("read")
    if (ckpt.step, comm.rank, os.environ["DDP_ATTEMPT"]) == (20, 1, "0"):
        note("killed")
        open("notes-killed", "w").write(notes[-1])
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if len(notes) == 4:
        note("stepped")
open(f"notes-{comm.rank}", "w").write("\\n".join(notes))
""",
}


# What a recovery is waiting for, and the moment at which it has that, on the last of the ranks.
PHASES = (
    ("0 failure", "ddp-launch hears of the kill", "c2"),
    ("1 rank_up", "the other rank ends, both start", "c3"),
    ("1 imported", "Python starts, import ddp", "c0"),
    ("1 met", "ranks meet: collectives.init()", "c0"),
    ("1 made", "data, model, optimizer", "c0"),
    ("1 read", "the state is read from memory", "c1"),
    ("1 stepped", "the next step", "c1"),
)
LEFT = 330  # px, of the time 0


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


def recovery(folder: str) -> None:
    print(*lines_of("ddp-launch -n 2 --max-restarts 1 --events events.jsonl recovery.py", folder), sep="\n")
    lines = [line for path in Path(folder).glob("notes-*") for line in path.read_text().splitlines()]
    moments = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in sorted(lines, key=_moment)}
    for line in Path(folder, "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        moments[f"{event['attempt']} {event['event']}"] = event["monotonic"]
    ends = [1e3 * (moments[name] - moments["0 killed"]) for name, *_ in PHASES]
    bottom, scale = 44 + 34 * len(PHASES), 450 / ends[-1]
    parts = []
    for ms in range(0, int(ends[-1]) + 100, 100):
        x = round(LEFT + scale * ms, 1)
        parts += [f'<path class="l" opacity="0.3" d="M{x} 36V{bottom}"/>', text(x, 28, str(ms), "s", size=13)]
    for row, (_, words, style) in enumerate(PHASES):
        begin, end, y = ends[row - 1] if row else 0.0, ends[row], 44 + 34 * row
        x, width = round(LEFT + scale * begin, 1), round(max(2.0, scale * (end - begin)), 1)
        parts += [text(16, y + 19, words, anchor="start"), box(x, y, width, 26, style=style)]
        parts.append(text(round(x + width + 8, 1), y + 19, f"{end - begin:.0f} ms", "s", "start"))
    words = f"SIGKILL to the end of the next step on both ranks: {ends[-1]:.0f} ms"
    parts.append(text(16, bottom + 24, words, "s", "start"))
    save("recovery", "From the kill of a rank to the end of the next step", 860, bottom + 40, parts)


def _moment(line: str) -> float:
    return float(line.rpartition(" ")[2])


def main() -> None:
    made = {each.__name__: each for each in (train, failures, step, recovery)}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            Path(folder, name).write_text(text)
        for name in sys.argv[1:] or made:
            made[name](folder)


if __name__ == "__main__":
    main()
