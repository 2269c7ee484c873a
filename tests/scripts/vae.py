"""A variational autoencoder (Kingma & Welling 2014, arXiv:1312.6114), its terms written by distributions."""

import numpy as np
import torch
import torch.distributions as D
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def pictures(n):
    """Filled rectangles, (n, 1, 16, 16)."""
    rng = np.random.default_rng(0)
    images = np.zeros((n, 1, 16, 16), dtype=np.float32)
    for image in images:
        top, left = rng.integers(1, 8, 2)
        height, width = rng.integers(3, 8, 2)
        image[0, top : top + height, left : left + width] = 1
    return torch.from_numpy(images)


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(256, 2 * latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 256),
            nn.Unflatten(1, (16, 4, 4)),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        )
        self.register_buffer("zero", torch.zeros(latent))

    @property
    def prior(self):
        return D.Independent(D.Normal(self.zero, torch.ones_like(self.zero)), 1)

    def encode(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        return D.Independent(D.Normal(mean, torch.exp(0.5 * log_variance)), 1)

    def decode(self, z):
        return D.Independent(D.Bernoulli(logits=self.decoder(z)), 3)

    def forward(self, x, beta=1.0):
        posterior = self.encode(x)
        z = posterior.rsample()
        return -self.decode(z).log_prob(x).mean(), beta * D.kl_divergence(posterior, self.prior).mean()


torch.manual_seed(0)
device = torch.device("cpu")
data = TensorDataset(pictures(96).to(torch.get_default_dtype()))
train, held_out = Subset(data, range(64)), Subset(data, range(64, 96))
model = VAE().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=12)
for epoch in range(3):
    model.train()
    for (x,) in DataLoader(train, batch_size=16, shuffle=True, drop_last=True):
        rebuilt, kl = model(x.to(device), beta=min(1.0, (epoch + 1) / 3))
        loss = rebuilt + kl
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        bound = torch.stack([sum(model(x)) for (x,) in DataLoader(held_out, batch_size=16)]).mean()
        samples = model.decode(model.prior.sample((8,))).mean
    print(f"epoch {epoch}: held out {bound.item():.3f}, brightness {samples.mean().item():.4f}")
