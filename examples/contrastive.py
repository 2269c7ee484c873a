"""Contrastive training as in CLIP: learns which right half of a handwritten digit belongs to which left half.

    python examples/contrastive.py
    ddp-launch -n 2 examples/contrastive.py

Each half has its own encoder, and each image is compared with all images of the global batch. `ddp.parallel.all_gather`
brings the embeddings from the other ranks, and its backward returns their gradients to these ranks. So any number of
ranks computes the same numbers up to rounding. Source: Radford et al. 2021, arXiv:2103.00020, section 2.3.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np
from train_digits import load_digits, make_loader

import collectives
import ddp
from collectives.progress_bar import progress_bar
from ddp import nn, parallel
from ddp.nn import functional as F


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training images (default: 60)")
    parser.add_argument("--batch-size", type=int, default=256, help="images per step, all ranks (default: 256)")
    parser.add_argument("--width", type=int, default=256, help="hidden units of an encoder (default: 256)")
    parser.add_argument("--dim", type=int, default=64, help="length of an embedding (default: 64)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and order (default: 0)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    return parser.parse_args(argv)


class Halves(nn.Module):
    """Computes embeddings (N, dim) of length 1 of the left and of the right halves of (N, 1, 8, 8) images.

    scale: (), the logarithm of the factor by which similarities are multiplied
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Flatten(), nn.Linear(32, width), nn.GELU(), nn.Linear(width, dim)) for _ in range(2)
        )
        self.scale = nn.Parameter(ddp.tensor(math.log(10.0)))

    def forward(self, images: ddp.Tensor) -> tuple[ddp.Tensor, ddp.Tensor]:
        left = self.left(images[..., :4])
        right = self.right(images[..., 4:])
        return F.normalize(left, dim=1), F.normalize(right, dim=1)


def loss_sum(model: nn.Module, scale: ddp.Tensor, images: ddp.Tensor, comm: collectives.Communicator) -> ddp.Tensor:
    """The loss of this rank's images against the global batch, summed over the images.

    images: (N_r, 1, 8, 8), where N_r may be 0; scale: see `Halves`. Every rank gathers the (N, 2 dim) embeddings of all
    N images.
    """
    left, right = model(images)
    lengths = comm.all_gather(np.array([len(images)])).tolist()
    all_left, all_right = parallel.all_gather(ddp.cat([left, right], dim=1), comm, lengths=lengths).chunk(2, dim=1)
    # Image i of this rank is number `first + i` of the global batch.
    first = sum(lengths[: comm.rank])
    partners = ddp.arange(first, first + len(images))
    similar_right = left @ all_right.T * scale.exp()
    similar_left = right @ all_left.T * scale.exp()
    return (
        F.cross_entropy(similar_right, partners, reduction="sum")
        + F.cross_entropy(similar_left, partners, reduction="sum")
    ) / 2


def count_found(model: nn.Module, images: np.ndarray, comm: collectives.Communicator) -> int:
    """Counts the left halves whose most similar right half of all `images` is their own; each rank tests its share."""
    mine = np.array_split(np.arange(len(images)), comm.size)[comm.rank]
    with ddp.no_grad():
        left, right = model(ddp.from_numpy(images[mine]))
        found = (left @ parallel.all_gather(right, comm).T).argmax(dim=1).numpy() == mine
    return int(comm.all_reduce(np.array(found.sum())))


def main() -> None:
    args = parse()
    comm = collectives.init()
    ddp.manual_seed(args.seed)
    images, labels, test_images, _ = load_digits(args.seed, args.dtype)
    net = Halves(args.width, args.dim).to(getattr(ddp, args.dtype))
    model = ddp.DataParallel(net, comm)
    optimizer = ddp.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    loader = make_loader(images, labels, args.batch_size, args.seed, comm)
    with progress_bar(total=args.epochs * len(loader), unit="step", log=False) as bar:
        for epoch in range(args.epochs):
            total = 0.0
            for x, _ in loader:
                loss = loss_sum(model, net.scale, x, comm)
                optimizer.zero_grad()
                model.backward(loss, weight=len(x))
                optimizer.step()
                total += float(comm.all_reduce(loss.detach().numpy()))
                bar.update()
            bar.set_postfix(loss=total / len(images))
            if comm.rank == 0 and (epoch + 1) % max(1, args.epochs // 6) == 0:
                bar.write(f"epoch {epoch + 1}: loss {total / len(images):.4f}", file=sys.stdout)
    found = count_found(model, test_images, comm)
    if comm.rank == 0:
        share = 100 * found / len(test_images)
        chance = 100 / len(test_images)
        print(f"retrieval {share:.1f} % ({found} of {len(test_images)} test images; by chance {chance:.1f} %)")


if __name__ == "__main__":
    main()
