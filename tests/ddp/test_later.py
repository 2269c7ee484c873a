"""What is for a GPU costs a process without one nothing: it is executed when a GPU is met, and then all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ddp import _cuda

ROOT = Path(__file__).parent.parent.parent

STEP = """
import sys
import ddp
from ddp import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.conv, self.batch = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.attend, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 16)
        self.drop, self.pool = nn.Dropout(0.1), nn.MaxPool2d(2)

    def forward(self, x):
        h = self.norm(self.embed(x))
        h = h + self.attend(h, h, h)[0]
        image = self.pool(ddp.relu(self.batch(self.conv(h.unsqueeze(1))))).mean()
        return self.out(self.drop(nn.functional.gelu(h))) + image

for make in (ddp.optim.SGD, ddp.optim.AdamW):
    model = Net()
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        x = ddp.randint(0, 16, (4, 8))
        loss = nn.functional.cross_entropy(model(x).reshape(-1, 16), x.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
ddp.normal(ddp.zeros(3), ddp.ones(3))
ddp.bernoulli(ddp.full((3,), 0.5))
x = ddp.randn(4)
x += 1.0
x[ddp.tensor([0, -1])] = (x > 0)[:2].float()
loss.item(), x.tolist(), x.numpy(), repr(x), x.erf(), x.relu_()

met = [name for name in sys.modules if name.startswith(("ddp._cuda.", "ddp.cuda"))]
assert not met, met
assert not {"cupy", "cudnn", "ddp.optim.device_update"} & {*sys.modules}
loaded = open("/proc/self/maps").read()
assert not [name for name in ("libcuda", "libcublas", "libcudnn", "libnvrtc") if name in loaded]
"""


def test_training_on_the_cpu_executes_nothing_of_a_gpu() -> None:
    subprocess.run([sys.executable, "-c", STEP], check=True, timeout=60, cwd=ROOT)


def test_every_kernel_is_there_once_a_gpu_is_met() -> None:
    _cuda.load()
    kernels = {path.stem for path in (ROOT / "ddp" / "_cuda").glob("*_kernels.py")}
    assert not {name for name in kernels if f"ddp._cuda.{name}" not in sys.modules}
