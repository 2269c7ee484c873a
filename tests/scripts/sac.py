"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv:1812.05905): swings up a pendulum."""

import copy
import itertools
import math
import random

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn import functional as F


class Pendulum:
    def __init__(self):
        self.angle = math.pi
        self.speed = 0.0

    def observe(self):
        return np.array([math.cos(self.angle), math.sin(self.angle), self.speed], dtype=np.float32)

    def step(self, torque):
        off = (self.angle + math.pi) % (2 * math.pi) - math.pi
        cost = off**2 + 0.1 * self.speed**2 + 0.001 * torque**2
        self.speed = float(np.clip(self.speed + 0.05 * (15 * math.sin(self.angle) + 3 * torque), -8, 8))
        self.angle += 0.05 * self.speed
        return self.observe(), -cost


def mlp(*sizes):
    layers = [part for n, m in itertools.pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.ModuleList([mlp(4, 32, 32, 1) for _ in range(2)])

    def forward(self, state, action):
        x = torch.cat([state, action], dim=-1)
        return [q(x) for q in self.q]


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_std = mlp(3, 32, 32), nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, state):
        h = F.relu(self.body(state))
        log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(self.log_std(h)) + 1)
        policy = TransformedDistribution(Normal(self.mean(h), log_std.exp()), [TanhTransform(cache_size=1)])
        action = policy.rsample()
        return action, policy.log_prob(action).sum(-1, keepdim=True)


torch.manual_seed(0)
random.seed(0)
actor, critic, env = Actor(), Critic(), Pendulum()
target = copy.deepcopy(critic).requires_grad_(False)
log_alpha = torch.zeros(1, requires_grad=True)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-3)
replay, state = [], env.observe()
for step in range(60):
    with torch.no_grad():
        action = actor(torch.from_numpy(state).float().unsqueeze(0))[0][0]
    after, reward = env.step(2 * action.item())
    replay.append((state, action.numpy(), np.float32([reward]), after))
    state = after
    if len(replay) < 32:
        continue
    columns = zip(*random.sample(replay, 32), strict=True)
    s, a, r, s2 = (torch.as_tensor(np.stack(column), dtype=torch.float) for column in columns)
    with torch.no_grad():
        a2, logp2 = actor(s2)
        y = r + 0.99 * (torch.minimum(*target(s2, a2)) - log_alpha.exp() * logp2)
    critic_loss = sum(F.mse_loss(q, y) for q in critic(s, a))
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    new, logp = actor(s)
    actor_loss = (log_alpha.exp().detach() * logp - torch.min(*critic(s, new))).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    alpha_loss = -(log_alpha * (logp.detach() - 1.0)).mean()
    alpha_optimizer.zero_grad()
    alpha_loss.backward()
    alpha_optimizer.step()
    for p, q in zip(critic.parameters(), target.parameters(), strict=True):
        q.data.mul_(0.995).add_(0.005 * p.data)
    if step % 10 == 0:
        print(f"{step}: {critic_loss.item():.4f} {actor_loss.item():.4f} {log_alpha.exp().item():.4f}")
