"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): a pretrained classifier of sequences learns another task."""

import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize


class Classifier(nn.Module):
    def __init__(self, width=32, vocabulary=20, classes=5):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(1, 12, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places).mean(dim=1))


class LoRA(nn.Module):
    """weight + B A * alpha/rank, A: (rank, in), B: (out, rank)"""

    def __init__(self, out, inputs, rank=4, alpha=8.0):
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.zeros(out, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, weight):
        return weight + torch.matmul(self.lora_B, self.lora_A).view(weight.shape) * self.scale


def train(model, parameters, label, steps, lr):
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
    for _ in range(steps):
        x = torch.randint(0, 20, (16, 12))
        logits = model(x)
        loss = F.cross_entropy(logits, label(x), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        schedule.step()
        accuracy = (logits.argmax(-1) == label(x)).double().mean().item()
    print(f"loss {loss.item():.4f}, accuracy {accuracy:.2f}")


torch.manual_seed(0)
base = Classifier()
train(base, base.parameters(), lambda x: x.sum(1) % 5, steps=8, lr=3e-3)
model = Classifier()
print(model.load_state_dict(base.state_dict()))
for p in model.parameters():
    p.requires_grad = False
adapted = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "linear" in name]
for module in adapted:
    parametrize.register_parametrization(module, "weight", LoRA(*module.weight.shape))
model.head[1] = nn.Linear(32, 5)
trained = [p for p in model.parameters() if p.requires_grad]
count = partial(sum, start=0)
print(f"{count(p.numel() for p in trained)} of {count(p.numel() for p in model.parameters())} parameters are trained")
train(model, trained, lambda x: x.max(1).values % 5, steps=8, lr=1e-2)
x = torch.arange(12).unsqueeze(0)
with torch.no_grad(), parametrize.cached():
    before = model(x)
for module in adapted:
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
print(f"merged: off by {(model(x) - before).abs().max():.0e}, {model(x).norm().item():.4f}")
