"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) on a cart that balances a pole."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

ENVS, STEPS, UPDATES, EPOCHS, BATCHES = 4, 32, 3, 2, 4


class Carts:
    """ENVS carts in parallel; the state of each is position, velocity, angle and angular velocity."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.state = self.begin(ENVS)

    def begin(self, n):
        return self.rng.uniform(-0.05, 0.05, (n, 4))

    def step(self, action):
        x, v, angle, w = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        push = (force + 0.05 * w**2 * np.sin(angle)) / 1.1
        bend = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        a = push - 0.05 * bend * np.cos(angle) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * a, angle + 0.02 * w, w + 0.02 * bend], 1)
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21)
        self.state[done] = self.begin(done.sum())
        return self.state, np.ones(ENVS), done


def layer(n, m, std=2**0.5):
    made = nn.Linear(n, m)
    nn.init.orthogonal_(made.weight, std)
    nn.init.constant_(made.bias, 0.0)
    return made


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(layer(4, 32), nn.Tanh(), layer(32, 32), nn.Tanh(), layer(32, 2, 0.01))
        self.critic = nn.Sequential(layer(4, 32), nn.Tanh(), layer(32, 32), nn.Tanh(), layer(32, 1, 1.0))

    def forward(self, x, action=None):
        policy = Categorical(logits=self.actor(x))
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(x).squeeze(-1)


torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
carts, agent = Carts(), Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / UPDATES)
states = torch.zeros((STEPS, ENVS, 4)).to(device)
actions, logprobs, rewards, dones, values = (torch.zeros((STEPS, ENVS)).to(device) for _ in range(5))
state, done = torch.Tensor(carts.state).to(device), torch.zeros(ENVS).to(device)
for update in range(UPDATES):
    for t in range(STEPS):
        states[t], dones[t] = state, done
        with torch.no_grad():
            actions[t], logprobs[t], _, values[t] = agent(state)
        after, reward, ended = carts.step(actions[t].cpu().numpy())
        rewards[t] = torch.tensor(reward).view(-1)
        state, done = torch.Tensor(after).to(device), torch.Tensor(ended).to(device)
    with torch.no_grad():
        following, carried = agent(state)[3], 0
        advantages = torch.zeros_like(rewards)
        for t in reversed(range(STEPS)):
            live = 1.0 - (done if t == STEPS - 1 else dones[t + 1])
            delta = rewards[t] + 0.99 * following * live - values[t]
            advantages[t] = carried = delta + 0.99 * 0.95 * live * carried
            following = values[t]
        returns = advantages + values
    for _ in range(EPOCHS):
        for rows in torch.randperm(STEPS * ENVS).chunk(BATCHES):
            _, logprob, entropy, value = agent(states.reshape(-1, 4)[rows], actions.reshape(-1).long()[rows])
            ratio = (logprob - logprobs.reshape(-1)[rows]).exp()
            advantage = advantages.reshape(-1)[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            surrogate = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage).mean()
            value_loss = F.mse_loss(value, returns.reshape(-1)[rows])
            loss = 0.5 * value_loss - surrogate - 0.01 * entropy.mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    schedule.step()
    print(f"update {update}: loss {loss.item():.4f}, norm {norm.item():.3f}, clipped {(ratio - 1).abs().gt(0.2).sum()}")
