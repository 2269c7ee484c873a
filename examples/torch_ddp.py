"""Trains a PyTorch model with DistributedDataParallel over the backend "ddp", on any number of ranks.

    ddp-launch -n 2 examples/torch_ddp.py
    mpiexec -n 2 python examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py --backend gloo

Except for `import collectives.torch` and the name of the backend, this is an ordinary PyTorch script. It needs PyTorch
2.12, 2.13 or 2.14.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import collectives.torch  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ddp", help="backend of torch.distributed (default: ddp)")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    x = torch.randn(2048, 20)
    data = TensorDataset(x, (x @ torch.randn(20, 1)).tanh())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
