"""Denoising diffusion (Ho et al. 2020, arXiv:2006.11239) of small pictures, with an average of the weights."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 50


def embed(t, width):
    angles = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(0, width, 2, device=t.device) / width)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, channels, out, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, channels), nn.GroupNorm(4, out)])
        self.convs = nn.ModuleList([nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)])
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * out))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, t):
        scale, shift = self.time(t)[:, :, None, None].chunk(2, dim=1)
        h = self.convs[0](F.silu(self.norms[0](x)))
        h = self.norms[1](h) * (1 + scale) + shift
        return self.convs[1](F.silu(h)) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(1, channels), nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 2, c // 2, h * w).transpose(-1, -2).unbind(1)
        attended = torch.einsum("bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * c**-0.5).softmax(-1), v)
        return x + self.out(attended.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, c=8, width=16):
        super().__init__()
        self.width, self.time = width, nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.first, self.last = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 1, 1)
        self.down, self.middle, self.up = Block(c, c, width), Block(c, 2 * c, width), Block(3 * c, c, width)
        self.attention = Attention(2 * c)

    def forward(self, x, t):
        t = self.time(embed(t, self.width))
        h = self.down(self.first(x), t)
        inner = self.attention(self.middle(F.avg_pool2d(h, 2), t))
        return self.last(self.up(torch.cat([h, F.interpolate(inner, scale_factor=2, mode="nearest")], dim=1), t))


torch.manual_seed(0)
betas = torch.linspace(1e-4, 0.05, STEPS)
alphas_bar = torch.cumprod(1 - betas, dim=0)
model = UNet()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
places = np.arange(8)
for step in range(8):
    x0 = torch.tensor(np.sin(places[:, None] + np.random.rand(8, 1, 1, 1) * places), dtype=betas.dtype)
    t, noise = torch.randint(0, STEPS, (8,)), torch.randn_like(x0)
    a = alphas_bar[t].view(-1, 1, 1, 1)
    loss = F.smooth_l1_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
    print(f"{step}: {loss.item():.5f}")
with torch.inference_mode():
    x = torch.randn(2, 1, 8, 8)
    for i in reversed(range(STEPS)):
        noise = ema(x, torch.full((2,), i, dtype=torch.long))
        x = (x - betas[i] / (1 - alphas_bar[i]).sqrt() * noise) / (1 - betas[i]).sqrt()
        if i > 0:
            x += betas[i].sqrt() * torch.randn_like(x)
    print(f"samples: {x.mean().item():.4f} +- {x.std().item():.4f}, {x.clamp(-1, 1).abs().sum().item():.3f}")
