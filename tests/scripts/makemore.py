"""Makes up words like those given, in the manner of makemore: counts of pairs, one layer, then a network by hand."""

import random

import torch
import torch.nn.functional as F

TEXT = """anna emma olivia ava isabella sophia
mia amelia harper evelyn abigail emily ella madison aria"""
WORDS = TEXT.split()
random.seed(42)
random.shuffle(WORDS)
CHARACTERS = ["."] + sorted(set("".join(WORDS)))
NUMBER = {character: i for i, character in enumerate(CHARACTERS)}
V, BLOCK, WIDTH, HIDDEN = len(CHARACTERS), 3, 4, 24

g = torch.Generator().manual_seed(2147483647)
N = torch.zeros((V, V), dtype=torch.int32)
for word in WORDS:
    for a, b in zip("." + word, word + ".", strict=True):
        N[NUMBER[a], NUMBER[b]] += 1
P = (N + 1).float()
P /= P.sum(1, keepdim=True)
nll = -sum(torch.log(P[NUMBER[a], NUMBER[b]]) for word in WORDS for a, b in zip("." + word, word + ".", strict=True))
print(f"pairs: {nll.item():.4f}")

xs = torch.tensor([NUMBER[a] for word in WORDS for a in "." + word])
ys = torch.tensor([NUMBER[b] for word in WORDS for b in word + "."])
W = torch.randn((V, V), generator=g, requires_grad=True)
for _ in range(5):
    counts = (F.one_hot(xs, num_classes=V).float() @ W).exp()
    probabilities = counts / counts.sum(1, keepdims=True)
    loss = -probabilities[torch.arange(xs.nelement()), ys].log().mean() + 0.01 * (W**2).mean()
    W.grad = None
    loss.backward()
    W.data += -50 * W.grad


class Linear:
    def __init__(self, n, m):
        self.weight, self.bias = torch.randn((n, m), generator=g) / n**0.5, torch.zeros(m)

    def __call__(self, x):
        self.out = x @ self.weight
        self.out += self.bias
        return self.out

    def parameters(self):
        return [self.weight, self.bias]


class BatchNorm:
    def __init__(self, n):
        self.training = True
        self.gamma, self.beta, self.mean, self.var = torch.ones(n), torch.zeros(n), torch.zeros(n), torch.ones(n)

    def __call__(self, x):
        mean, var = (x.mean(0, keepdim=True), x.var(0, keepdim=True)) if self.training else (self.mean, self.var)
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * mean
                self.var = 0.9 * self.var + 0.1 * var
        self.out = torch.tanh(self.gamma * (x - mean) / torch.sqrt(var + 1e-5) + self.beta)
        return self.out

    def parameters(self):
        return [self.gamma, self.beta]


contexts = [("." * BLOCK + word + ".")[i : i + BLOCK + 1] for word in WORDS for i in range(len(word) + 1)]
data = torch.tensor([[NUMBER[character] for character in context] for context in contexts])
X, Y = data[:, :-1], data[:, -1]
C = torch.randn((V, WIDTH), generator=g)
layers = [Linear(BLOCK * WIDTH, HIDDEN), BatchNorm(HIDDEN), Linear(HIDDEN, V)]
with torch.no_grad():
    layers[-1].weight *= 0.1
parameters = [C] + [p for layer in layers for p in layer.parameters()]
for p in parameters:
    p.requires_grad = True


def predict(x):
    x = C[x].view(x.shape[0], -1)
    for layer in layers:
        x = layer(x)
    return x


for i in range(20):
    batch = torch.randint(0, X.shape[0], (32,), generator=g)
    loss = F.cross_entropy(predict(X[batch]), Y[batch])
    for layer in layers:
        layer.out.retain_grad()
    for p in parameters:
        p.grad = None
    loss.backward()
    for p in parameters:
        p.data += -(0.5 if i < 15 else 0.05) * p.grad
print([(0.1 * p.grad.std() / p.data.std()).log10().item() for p in parameters if p.ndim == 2])
print(f"saturated: {(layers[1].out.abs() > 0.97).float().mean().item():.3f}")
layers[1].training = False
for _ in range(3):
    out, context = [], [0] * BLOCK
    while True:
        probs = F.softmax(predict(torch.tensor([context])), dim=1)
        i = torch.multinomial(probs, num_samples=1, replacement=True, generator=g).item()
        context = context[1:] + [i]
        out.append(i)
        if i == 0 or len(out) > 12:
            break
    print("".join(CHARACTERS[i] for i in out))
