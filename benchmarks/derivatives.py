"""Steps that differentiate gradients against PyTorch's, on one core: time and peak memory.

    python -m benchmarks.derivatives [--rounds 9] [--only maml,pinn] [--cores 0] [--json FILE]

Each step is written once, for `ddp` and `torch` alike, in float32; weights, losses, processes and rounds are those of
`benchmarks.zoo`. Needs PyTorch (`pip install '.[bench]'`).
"""

from __future__ import annotations

from typing import Any

from benchmarks import models, train_step, zoo
from benchmarks.train_step import Step, adamw, floats, step_of
from benchmarks.zoo import load_weights


def derivative(t: Any, y: Any, x: Any) -> Any:
    """The gradient of the sum of y with respect to x, with a graph."""
    return t.autograd.grad(y.sum(), x, create_graph=True)[0]


def wgan_gp(t: Any) -> Step:
    """A step of a critic. Source: Gulrajani et al. 2017, arXiv:1704.00028."""
    critic = load_weights(t, train_step.mlp(t, (64, 512, 512, 512, 1), 1, adamw).model)
    real, fake, mixed = (floats(t, 256, 64, seed=i).requires_grad_(i == 2) for i in range(3))

    def loss() -> Any:
        norms = derivative(t, critic(mixed), mixed).norm(2, dim=1)
        return critic(fake).mean() - critic(real).mean() + 10 * ((norms - 1) ** 2).mean()

    return step_of(adamw(t, critic), loss)


def r1(t: Any) -> Step:
    """A penalty on images. Source: Mescheder et al. 2018, arXiv:1801.04406."""
    net = load_weights(t, models.dcgan(t, noise=1, width=32)[1])
    images = floats(t, 16, 3, 32, 32).requires_grad_()

    def loss() -> Any:
        scores = net(images)
        penalty = derivative(t, scores, images).square().sum((1, 2, 3)).mean()
        return t.nn.functional.softplus(-scores).mean() + penalty

    return step_of(adamw(t, net), loss)


def maml(t: Any) -> Step:
    """Five steps inside of one. Source: Finn et al. 2017, arXiv:1703.03400."""
    task = train_step.mlp(t, (784, 256, 128, 64, 5), 25, adamw)
    net = load_weights(t, task.model)

    def loss_of(weights: Any) -> Any:
        x = t.nn.functional.linear(task.x, *weights[:2])
        for i in range(2, len(weights), 2):
            x = t.nn.functional.linear(x.relu(), *weights[i : i + 2])
        return t.nn.functional.cross_entropy(x, task.y)

    def loss() -> Any:
        weights = list(net.parameters())
        for _ in range(5):
            gradients = t.autograd.grad(loss_of(weights), weights, create_graph=True)
            weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return loss_of(weights)

    return step_of(adamw(t, net), loss)


def hvp(t: Any) -> Step:
    """The gradient of half the squared gradient of a GPT's loss: its Hessian times the gradient."""
    task = train_step.gpt(t, {**train_step.GPT, "layers": 2, "length": 64}, 8)
    net = load_weights(t, task.model)
    attention = t.nn.attention

    def loss() -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.MATH):  # PyTorch's others are differentiable once
            value = train_step.loss_of(t, net, task)
        gradients = t.autograd.grad(value, list(net.parameters()), create_graph=True)
        return sum(g.square().sum() for g in gradients) / 2

    return step_of(adamw(t, net), loss)


def pinn(t: Any) -> Step:
    """u_t + u*u_x + u_xxx = 0, of Korteweg and de Vries. Source: Raissi et al. 2019, J. Comput. Phys. 378."""
    net = load_weights(t, train_step.mlp(t, (2, 64, 64, 64, 64, 1), 1, adamw).model)
    for i in range(1, 9, 2):
        net[i] = t.nn.Tanh()
    points = floats(t, 1000, 2).requires_grad_()

    def loss() -> Any:
        u = net(points)[:, 0]
        u_x, u_t = derivative(t, u, points).unbind(1)
        u_xx = derivative(t, u_x, points)[:, 0]
        return (u_t + u * u_x + derivative(t, u_xx, points)[:, 0]).square().mean()

    return step_of(adamw(t, net), loss)


def lstm(t: Any) -> Step:
    """A penalty on the gradient of the input."""
    net = load_weights(t, t.nn.LSTM(32, 64))
    x = floats(t, 32, 16, 32).requires_grad_()
    return step_of(adamw(t, net), lambda: derivative(t, net(x)[0].square(), x).square().mean())


STEPS: zoo.Steps = {
    "wgan-gp": ("WGAN-GP, MLP of 3 x 512, batch 256", 1.3, wgan_gp),
    "r1": ("R1 penalty, discriminator of DCGAN, 32x32, batch 16", 1.3, r1),
    "maml": ("MAML, MLP 784-256-128-64-5, batch 25, 5 inner steps", 1.3, maml),
    "hvp": ("GPT 2 layers, d=128, T=64, batch 8, Hessian-vector product", 1.3, hvp),
    "pinn": ("PINN of u_xxx, MLP of 4 x 64, 1000 points", 1.3, pinn),
    "lstm": ("LSTM of 64, T=32, batch 16, penalty of the input", 1.3, lstm),
}


class Worker(zoo.Worker):
    """Takes steps with one library, on request."""

    table = STEPS


if __name__ == "__main__":
    zoo.main(__doc__, "derivatives", STEPS, ["0"])
