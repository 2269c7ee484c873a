"""One training step of the models that people train against PyTorch's, on one core and on all: time and peak memory.

    python -m benchmarks.zoo [--rounds 9] [--only resnet18,unet] [--cores 0 0,1] [--json FILE]

Each model is written once, for `ddp` and `torch` alike, and starts from the same weights in both; where the losses of
the first steps differ, there are no times. Processes and rounds are those of `benchmarks.train_step`, which has GPT-2
and the small GPT. Needs PyTorch (`pip install '.[bench]'`).

The floor is that of `benchmarks.train_step`; a 3x3 convolution by Winograd's algorithm needs fewer products than it
counts, so that a step may be below.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import harness, models, train_step
from benchmarks.gpu.tasks import weights
from benchmarks.train_step import Step, adamw, floats, integers, step_of

LOSSES_AGREE = 1e-2  # relative: in five steps of AdamW differences of rounding grow


def load_weights(t: Any, model: Any) -> Any:
    values = weights(model)
    with t.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(t.from_numpy(values[name]))
    return model


def classify(t: Any, model: Any, batch: int) -> Step:
    """Images of 32x32 in ten classes."""
    load_weights(t, model)
    x = floats(t, batch, 3, 32, 32)
    y = integers(t, 10, batch)
    return step_of(adamw(t, model), lambda: t.nn.functional.cross_entropy(model(x), y))


def unet(t: Any) -> Step:
    """Noise of images of 32x32 is told from them, as in a diffusion model."""
    model = load_weights(t, models.unet(t, widths=(32, 64, 128)))
    x = floats(t, 16, 3, 32, 32)
    y = floats(t, 16, 3, 32, 32, seed=1)
    return step_of(adamw(t, model), lambda: t.nn.functional.mse_loss(model(x), y))


def label(t: Any, model: Any, vocabulary: int, labels: int, batch: int, length: int) -> Step:
    """A label for each token."""
    load_weights(t, model)
    x = integers(t, vocabulary, batch, length)
    y = integers(t, labels, batch * length, seed=1)
    return step_of(adamw(t, model), lambda: t.nn.functional.cross_entropy(model(x).reshape(-1, labels), y))


def translate(t: Any) -> Step:
    model = load_weights(t, models.encoder_decoder(t, vocabulary=1000, width=256, heads=4, layers=2))
    source = integers(t, 1000, 16, 48)
    target = integers(t, 1000, 16, 40, seed=1)
    y = integers(t, 1000, 16 * 40, seed=2)
    return step_of(adamw(t, model), lambda: t.nn.functional.cross_entropy(model(source, target).reshape(-1, 1000), y))


def dcgan(t: Any) -> Step:
    """A step of the discriminator and one of the generator; the sum of their losses."""
    generator, discriminator = (load_weights(t, model) for model in models.dcgan(t, noise=64, width=32))
    fit_generator, fit_discriminator = (
        t.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (generator, discriminator)
    )
    noise = floats(t, 32, 64, 1, 1)
    real = floats(t, 32, 3, 32, 32, seed=1)
    ones = t.ones(32)
    zeros = t.zeros(32)
    loss_of = t.nn.functional.binary_cross_entropy_with_logits

    def step() -> float:
        fit_discriminator.zero_grad()
        fake = generator(noise)
        loss = loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros)
        loss.backward()
        fit_discriminator.step()
        fit_generator.zero_grad()
        fooled = loss_of(discriminator(fake), ones)
        fooled.backward()
        fit_generator.step()
        return float(loss.detach()) + float(fooled.detach())

    return step


Steps = dict[str, tuple[str, float, Callable[[Any], Step]]]  # label, goal, and what makes a step of a library
STEPS: Steps = {
    "resnet18": (
        "ResNet-18, 32x32, batch 16",
        0.78,
        lambda t: classify(t, models.resnet18(t, classes=10, small_images=True), 16),
    ),
    "mobilenet": ("MobileNetV2, 32x32, batch 32", 0.8, lambda t: classify(t, models.mobilenet_v2(t, classes=10), 32)),
    "unet": ("U-Net 32-64-128, GroupNorm, 32x32, batch 16", 0.7, unet),
    "vit": (
        "ViT 6 layers, d=192, 3 heads, patches of 4, batch 16",
        0.8,
        lambda t: classify(t, models.vit(t, width=192, heads=3, layers=6, classes=10), 16),
    ),
    "lstm": (
        "LSTM language model, 2 layers of 256, T=64, batch 16",
        0.9,
        lambda t: label(t, models.lstm(t, vocabulary=2000, width=256, layers=2), 2000, 2000, 16, 64),
    ),
    "gru": (
        "GRU tagger, both directions of 128, T=40, batch 32",
        0.9,
        lambda t: label(t, models.gru_tagger(t, vocabulary=2000, width=128, tags=17), 2000, 17, 32, 40),
    ),
    "translate": ("Transformer, 2 and 2 layers, d=256, T=48 and 40, batch 16", 0.85, translate),
    "dcgan": ("DCGAN, 32x32, both networks, batch 32", 0.8, dcgan),
}


class Worker(train_step.Worker):
    """Trains a model of the zoo with one library, on request."""

    table = STEPS

    def make_step(self) -> Step:
        return self.table[self.key][2](self.t)


def disagreement(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of the losses of the first steps."""
    ddp_losses, torch_losses = losses.values()
    return max(abs(a - b) / abs(b) for a, b in zip(ddp_losses, torch_losses, strict=True))


def compare(key: str, rounds: int, module: str, floor: bool) -> dict[str, Any]:
    """As `train_step.compare`, after the losses. module: whose `Worker` runs. Raises: SystemExit if they differ.

    floor: also the seconds below which no step of these products and this update goes
    """
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(train_step.start(key, name, module)) for name in train_step.LIBRARIES}
        peaks = {name: pool.request("first")[0] for name, pool in pools.items()}
        losses = {name: pool.request("losses")[0] for name, pool in pools.items()}
        if not disagreement(losses) <= LOSSES_AGREE:
            sys.exit(f"{key}: the losses of the first steps differ, so that times mean nothing: {losses}")
        result = {**train_step.take_turns(pools, rounds), "losses": losses, "peak_kib": peaks}
        if floor:
            result |= train_step.measure_floor(pools)
        return result


def main(doc: str, module: str, steps: Steps, cores: list[str], floor: bool = False) -> None:
    """Compares the steps of a module with a `Worker`. cores: lists of those to run on, unless the user says others"""
    parser = harness.parser(doc, rounds=9, only=steps)
    text = f"lists of cores to run on, one list after the other, one thread per core (default: {' '.join(cores)})"
    parser.add_argument("--cores", nargs="+", default=cores, help=text)
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for chosen in dict.fromkeys(args.cores):
        os.sched_setaffinity(0, map(int, chosen.split(",")))
        print(f"cores {chosen}")
        print(train_step.HEAD + (train_step.FLOOR_HEAD if floor else ""))
        for key in args.only:
            title, goal, _ = steps[key]
            result = compare(key, args.rounds, module, floor)
            rows.setdefault(chosen, {})[key] = {"label": title, "goal": goal, **result}
            print(train_step.describe(title, goal, result), flush=True)
    harness.write(args.json, module, rows=rows)


if __name__ == "__main__":
    main(__doc__, "zoo", STEPS, ["0", ",".join(map(str, sorted(os.sched_getaffinity(0))))], floor=True)
