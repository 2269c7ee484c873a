"""Trains a small PyTorch transformer with sharded parameters (FSDP2), and saves a distributed checkpoint.

    ddp-launch -n 2 examples/torch_fsdp.py
    ddp-launch -n 2 examples/torch_fsdp.py --checkpoint runs/fsdp

Each rank holds its part of every parameter; collectives of the backend "ddp" gather a layer's parameters before it is
used, and sum its gradients afterwards. It needs PyTorch 2.12, 2.13 or 2.14.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint, init_device_mesh
from torch.distributed.fsdp import fully_shard

import collectives.torch  # noqa: F401


class Model(nn.Module):
    """Predicts the next character. Input: (B, T) numbers below 32; returns (B, T, 32) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", metavar="DIR", help="save there at the end")
    arguments = parser.parse_args()

    dist.init_process_group("ddp")
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*model.layers, model):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(arguments.steps):
        start = torch.randint(0, 32, (8, 1), generator=generator)
        text = (start + torch.arange(17)) % 32  # consecutive numbers from a random start
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.3f}")
    if arguments.checkpoint:
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=arguments.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
