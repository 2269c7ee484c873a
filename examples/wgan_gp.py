"""A Wasserstein GAN with a gradient penalty learns to make points at eight spots from noise; writes a PNG.

    python examples/wgan_gp.py --out wgan_gp.png
    ddp-launch -n 2 examples/wgan_gp.py

The critic's loss contains the length of the critic's gradient, so its backward differentiates a gradient. Each rank
computes the penalty of its own points, and DataParallel averages as usual.

Source: Gulrajani et al. 2017, arXiv:1704.00028.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from PIL import Image

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp import nn

NOISE = 4  # random numbers from which a point is made
SPOTS, SPREAD = 8, 0.05  # spots on the unit circle, and the standard deviation of the points around each


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps of the generator (default: 400)")
    parser.add_argument("--critic-steps", type=int, default=5, help="critic steps per generator step (default: 5)")
    parser.add_argument("--batch-size", type=int, default=256, help="points per step, all ranks (default: 256)")
    parser.add_argument("--penalty", type=float, default=1.0, help="factor of the penalty in the loss (default: 1)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of both networks (default: 1e-3)")
    parser.add_argument("--width", type=int, default=64, help="hidden units per layer (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and points (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("wgan_gp.png"), help="the picture (default: wgan_gp.png)")
    return parser.parse_args(argv)


def make_net(inputs: int, outputs: int, width: int) -> nn.Module:
    """A net from (N, inputs) to (N, outputs). No batch normalization: a point's penalty must not depend on others."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


def centers() -> ddp.Tensor:
    """(SPOTS, 2): the centers of the spots."""
    angles = ddp.arange(SPOTS) * (2 * np.pi / SPOTS)
    return ddp.stack([angles.cos(), angles.sin()], dim=1)


def real_points(count: int) -> ddp.Tensor:
    """(count, 2) points of the distribution to learn."""
    return centers()[ddp.randint(SPOTS, (count,))] + SPREAD * ddp.randn(count, 2)


def gradient_penalty(critic: nn.Module, real: ddp.Tensor, fake: ddp.Tensor) -> ddp.Tensor:
    """The mean of (|gradient| - 1)^2 at points between real and generated ones. real, fake: (N, 2); returns ()."""
    part = ddp.rand(len(real), 1)
    between = (part * real + (1 - part) * fake).requires_grad_()
    (slope,) = ddp.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def save_picture(critic: nn.Module, real: ddp.Tensor, fake: ddp.Tensor, path: Path, side: int = 480) -> None:
    """Writes the critic's values in grey, real points in blue and generated ones in orange, from -1.5 to 1.5."""
    axis = ddp.linspace(-1.5, 1.5, side // 4)
    plane = ddp.stack(ddp.meshgrid(axis, axis, indexing="xy"), dim=-1).flip(0).reshape(-1, 2)
    with ddp.no_grad():
        height = critic(plane).reshape(len(axis), len(axis)).numpy()
    grey = 80 + 175 * (height - height.min()) / max(np.ptp(height), 1e-6)
    pixels = grey.astype(np.uint8).repeat(4, 0).repeat(4, 1)[..., None].repeat(3, 2)
    for points, colour in ((real, (40, 90, 200)), (fake, (230, 110, 20))):
        columns, rows = ((points.numpy() * (1, -1) + 1.5) * (side / 3)).astype(int).clip(1, side - 2).T
        for step in (-1, 0, 1):
            pixels[rows + step, columns] = pixels[rows, columns + step] = colour
    Image.fromarray(pixels).save(path)


def main() -> None:
    args = parse()
    comm = collectives.init()
    ddp.manual_seed(args.seed)
    count = args.batch_size // comm.size
    generator = ddp.DataParallel(make_net(NOISE, 2, args.width), comm)
    critic = ddp.DataParallel(make_net(2, 1, args.width), comm)
    optimizer_g = ddp.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.9))
    optimizer_c = ddp.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.9))
    ddp.manual_seed(args.seed + 1 + comm.rank)  # each rank draws other points
    start = time.perf_counter()
    with progress_bar(total=args.steps, unit="step", log=False) as bar:
        for step in range(args.steps):
            for _ in range(args.critic_steps):
                real = real_points(count)
                with ddp.no_grad():
                    fake = generator(ddp.randn(count, NOISE))
                # An estimate of the distance between the distributions. The critic maximizes it, and the penalty keeps
                # the critic from being steep.
                distance = critic(real).mean() - critic(fake).mean()
                penalty = gradient_penalty(critic, real, fake)
                optimizer_c.zero_grad()
                (args.penalty * penalty - distance).backward()
                optimizer_c.step()

            # The generator learns to make points where the critic's value is high; only the generator is updated.
            optimizer_g.zero_grad()
            (-critic(generator(ddp.randn(count, NOISE))).mean()).backward()
            optimizer_g.step()
            bar.update()
            if comm.rank == 0 and (step + 1) % max(1, args.steps // 6) == 0:
                line = f"step {step + 1}: distance {distance.item():.3f}, penalty {penalty.item():.3f}"
                with bar.external_write_mode():
                    print(line, flush=True)
    if comm.rank == 0:
        with ddp.no_grad():
            fake = generator.module(ddp.randn(1000, NOISE))
        nearest = (fake[:, None] - centers()).norm(dim=2).amin(1)
        reached = (fake[:, None] - centers()).norm(dim=2).argmin(1)[nearest < 0.2].unique()
        share = 100 * (nearest < 0.2).float().mean().item()
        save_picture(critic.module, real_points(1000), fake, args.out)
        print(f"{len(reached)} of {SPOTS} spots reached, {share:.1f} % of the points at a spot")
        print(f"1000 points in {args.out}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
