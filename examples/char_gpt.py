"""A small GPT on characters, trained on text that every machine has: the sources of Python's standard library.

    python examples/char_gpt.py
    ddp-launch -n 2 examples/char_gpt.py --steps 500
    ddp-launch -n gpu examples/char_gpt.py --device cuda --graph

Prints the loss on held-out text (a model that guesses at random has log 96 = 4.56), and a sample of generated text.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import numpy as np

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp import nn
from ddp.nn import functional as F

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # 96 characters; anything else is left out


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="updates (default: 300)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, all ranks (default: 16)")
    parser.add_argument("--length", type=int, default=128, help="characters per sequence (default: 128)")
    parser.add_argument("--width", type=int, default=128, help="features per character (default: 128)")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (default: 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate (default: 1e-3)")
    parser.add_argument("--bytes", type=int, default=2_000_000, help="length of the text (default: 2,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--graph", action="store_true", help="on a GPU: run each step as one CUDA graph")
    args = parser.parse_args(argv)
    if args.graph and not args.device.startswith("cuda"):
        parser.error("--graph needs --device cuda")
    return args


def load_text(size: int) -> np.ndarray:
    """The first `size` characters of the library's sources, ordered by file name, as numbers below 96."""
    text = []
    length = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text.append(path.read_text(errors="ignore"))
        length += len(text[-1])
        if length >= size:
            break
    codes = np.frombuffer("".join(text)[:size].encode("latin-1", "ignore"), np.uint8)
    table = np.full(256, -1)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    numbers = table[codes]
    return numbers[numbers >= 0]


class GPT(nn.Module):
    """Computes, for (N, T) characters, the (N, T, 96) logits of the next character after each."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(length, width)
        # GELU by tanh, as in GPT-2: a GPU computes it in one kernel with the product before it.
        layer = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "activation": nn.GELU("tanh")}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, batch_first=True, norm_first=True, **layer) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.characters.weight  # tied: one matrix for input and output characters
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: ddp.Tensor) -> ddp.Tensor:
        """x: (N, T) int64."""
        length = x.shape[1]
        hidden = self.characters(x) + self.positions(ddp.arange(length, device=x.device))
        later = ddp.ones(length, length, dtype=ddp.bool, device=x.device).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=later, is_causal=True)
        return self.head(self.norm(hidden))


def draw(text: np.ndarray, starts: np.ndarray, length: int) -> tuple[ddp.Tensor, ddp.Tensor]:
    """Two tensors (N, T): characters of the text from each start on, and for each of them the next character."""
    windows = text[starts[:, None] + np.arange(length + 1)]
    return ddp.from_numpy(windows[:, :-1].copy()), ddp.from_numpy(windows[:, 1:].copy())


def sample(model: nn.Module, prompt: str, count: int, length: int) -> str:
    """`prompt` and `count` more characters, drawn from the model's probabilities at temperature 0.8."""
    numbers = [ALPHABET.index(character) for character in prompt]
    with ddp.no_grad():
        for _ in range(count):
            logits = model(ddp.tensor([numbers[-length:]], device=next(model.parameters()).device))[0, -1]
            numbers.append(int(ddp.multinomial(F.softmax(logits / 0.8, dim=-1), 1)))
    return "".join(ALPHABET[number] for number in numbers)


def main() -> None:
    args = parse()
    comm = collectives.init()
    if args.device.startswith("cuda") and not ddp.cuda.is_available():
        raise SystemExit(f"--device {args.device}: no CUDA GPU here, or no CuPy (pip install -e '.[cuda12]')")
    ddp.manual_seed(args.seed)
    text = load_text(args.bytes)
    held = text[-max(len(text) // 20, 4 * args.length) :]
    text = text[: -len(held)]
    model = ddp.DataParallel(GPT(args.width, args.layers, args.length).to(args.device), comm)
    optimizer = ddp.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = ddp.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps + 1, pct_start=0.1)
    order = np.random.default_rng(args.seed)

    def train(x: ddp.Tensor, y: ddp.Tensor) -> ddp.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        optimizer.zero_grad()
        model.backward(loss, weight=y.numel())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    if args.graph:
        train = ddp.cuda.graphed_step(train)
    start = time.perf_counter()
    with progress_bar(range(args.steps), unit="step", log=False) as bar:
        for step in bar:
            starts = np.array_split(order.integers(0, len(text) - args.length, args.batch_size), comm.size)[comm.rank]
            x, y = draw(text, starts, args.length)
            loss = train(x.to(args.device), y.to(args.device))
            schedule.step()
            # The loss is read only now and then, because reading it waits for the GPU.
            if comm.rank == 0 and (step + 1) % max(1, args.steps // 10) == 0:
                each = (time.perf_counter() - start) / (step + 1)
                mean = loss.item() / y.numel()
                bar.set_postfix(loss=mean, refresh=False)
                with bar.external_write_mode():
                    print(f"step {step + 1}: loss {mean:.3f}, {1000 * each:.0f} ms per step", flush=True)
    if comm.rank == 0:
        net = model.module.eval()
        x, y = draw(held, np.arange(0, len(held) - args.length - 1, args.length)[:64], args.length)
        x, y = x.to(args.device), y.to(args.device)
        with ddp.no_grad():
            print(f"held-out loss {F.cross_entropy(net(x).flatten(0, 1), y.flatten()).item():.3f}")
        print(sample(net, "def ", 200, args.length))


if __name__ == "__main__":
    main()
