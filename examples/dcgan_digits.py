"""A DCGAN on scikit-learn's handwritten digits: generator and discriminator have an optimizer each; writes a PNG.

    python examples/dcgan_digits.py --out samples.png
    ddp-launch -n 2 examples/dcgan_digits.py

Source: Radford et al. 2016, arXiv:1511.06434, at 8x8 pixels.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from PIL import Image
from train_digits import load_digits

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp import nn
from ddp.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 32  # random numbers from which a sample is made


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="passes over the images (default: 60)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of both networks (default: 2e-4)")
    parser.add_argument("--width", type=int, default=64, help="channels of 4x4 feature maps (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, noise and order (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("samples.png"), help="the picture (default: samples.png)")
    return parser.parse_args(argv)


def make_generator(width: int) -> nn.Module:
    """A net from (N, NOISE, 1, 1) noise to (N, 1, 8, 8) images with values from -1 to 1."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * width, 2, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator(width: int) -> nn.Module:
    """A net from (N, 1, 8, 8) images to (N, 1) logits, which are positive for images that look real."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 2),
        nn.Flatten(),
    )


def initialize(module: nn.Module) -> None:
    """Draws a layer's weights as in the paper: normal, with standard deviation 0.02."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def save_grid(images: np.ndarray, path: Path, columns: int = 8, zoom: int = 6) -> None:
    """Writes images (N, 1, 8, 8) with values from -1 to 1 to one PNG, side by side."""
    rows = len(images) // columns
    framed = np.pad(images[: rows * columns, 0], ((0, 0), (1, 1), (1, 1)), constant_values=-1.0)
    height, width = framed.shape[1:]
    grid = framed.reshape(rows, columns, height, width).transpose(0, 2, 1, 3).reshape(rows * height, columns * width)
    pixels = ((grid + 1) * 127.5).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels.repeat(zoom, 0).repeat(zoom, 1)).save(path)


def main() -> None:
    args = parse()
    comm = collectives.init()
    ddp.manual_seed(args.seed)
    data = TensorDataset(load_digits(args.seed, "float32")[0] * 2 - 1)
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True, comm=comm)
    # Batch normalization needs the same number of samples on every rank and in every step.
    loader = DataLoader(data, args.batch_size // comm.size, sampler=sampler, drop_last=True)
    generator = ddp.DataParallel(make_generator(args.width).apply(initialize), comm)
    discriminator = ddp.DataParallel(make_discriminator(args.width).apply(initialize), comm)
    optimizer_g = ddp.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_d = ddp.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    fixed = ddp.randn(64, NOISE, 1, 1)  # the noise of the picture
    ddp.manual_seed(args.seed + 1 + comm.rank)  # each rank draws other noise
    start = time.perf_counter()
    with progress_bar(total=args.epochs * len(loader), unit="step", log=False) as bar:
        for epoch in range(args.epochs):
            totals = np.zeros(3)
            for (real,) in loader:
                fake = generator(ddp.randn(len(real), NOISE, 1, 1))
                ones = ddp.ones(len(real), 1)
                zeros = ddp.zeros(len(real), 1)

                # The discriminator learns to separate real from generated images; the generator gets no gradient.
                optimizer_d.zero_grad()
                loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
                loss_d.backward()
                optimizer_d.step()

                # The generator learns to make images that the discriminator takes for real. Only it is updated here.
                optimizer_g.zero_grad()
                loss_g = criterion(discriminator(fake), ones)
                loss_g.backward()
                optimizer_g.step()
                totals += loss_d.item(), loss_g.item(), 1
                bar.set_postfix(discriminator=loss_d.item(), generator=loss_g.item(), refresh=False)
                bar.update()
            if comm.rank == 0 and (epoch + 1) % max(1, args.epochs // 6) == 0:
                loss_d_mean, loss_g_mean = totals[:2] / max(totals[2], 1)
                line = f"epoch {epoch + 1}: discriminator {loss_d_mean:.3f}, generator {loss_g_mean:.3f}"
                with bar.external_write_mode():
                    print(line, flush=True)
    if comm.rank == 0:
        generator.eval()
        with ddp.no_grad():
            save_grid(generator.module(fixed).numpy(), args.out)
        print(f"64 samples in {args.out}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
