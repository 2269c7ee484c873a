"""A selective state space model (Gu & Dao 2023, arXiv:2312.00752), step by step in time, copies a sequence."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import einsum, rearrange, repeat


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Mamba(nn.Module):
    def __init__(self, width, states=4, kernel=3, expand=2):
        super().__init__()
        self.inner, self.rank = expand * width, math.ceil(width / 16)
        self.in_proj = nn.Linear(width, 2 * self.inner, bias=False)
        self.conv1d = nn.Conv1d(self.inner, self.inner, kernel, groups=self.inner, padding=kernel - 1)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner)
        dt = torch.exp(torch.rand(self.inner) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.dt_proj.bias._no_reinit = True
        self.A_log = nn.Parameter(torch.log(repeat(torch.arange(1, states + 1).float(), "n -> d n", d=self.inner)))
        self.A_log._no_weight_decay = True
        self.D = nn.Parameter(torch.ones(self.inner))
        self.D._no_weight_decay = True
        self.out_proj = nn.Linear(self.inner, width, bias=False)

    def forward(self, x):
        length = x.shape[1]
        x, z = self.in_proj(x).split([self.inner, self.inner], dim=-1)
        x = rearrange(self.conv1d(rearrange(x, "b l d -> b d l"))[..., :length], "b d l -> b l d")
        return self.out_proj(self.scan(F.silu(x)) * F.silu(z))

    def scan(self, u):
        states = self.A_log.shape[1]
        dt, B, C = self.x_proj(u).split([self.rank, states, states], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(einsum(dt, -torch.exp(self.A_log.float()), "b l d, d n -> b l d n"))
        inputs = einsum(dt, B, u, "b l d, b l n, b l d -> b l d n")
        h = u.new_zeros(u.shape[0], self.inner, states)
        ys = []
        for i in range(u.shape[1]):
            h = decay[:, i] * h + inputs[:, i]
            ys.append(einsum(h, C[:, i, :], "b d n, b n -> b d"))
        return torch.stack(ys, dim=1) + u * self.D


class Model(nn.Module):
    def __init__(self, vocabulary=10, width=16, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([nn.Sequential(RMSNorm(width), Mamba(width)) for _ in range(layers)])
        self.norm_f, self.lm_head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.lm_head(self.norm_f(h))


torch.manual_seed(0)
model = Model()
groups = {True: [], False: []}
for p in model.parameters():
    groups[p.ndim < 2 or getattr(p, "_no_weight_decay", False)].append(p)
optimizer = torch.optim.AdamW(
    [{"params": groups[False], "weight_decay": 0.1}, {"params": groups[True], "weight_decay": 0.0}], lr=5e-3
)
print([len(group) for group in groups.values()])
for step in range(8):
    first = torch.randint(1, 10, (8, 6))
    x = torch.cat([first, torch.zeros_like(first[:, :1]), first], dim=1)
    logits, y = model(x[:, :-1]), x[:, 1:].clone()
    y[:, :6] = -100
    loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1), ignore_index=-100)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"{step}: {loss.item():.5f}")
