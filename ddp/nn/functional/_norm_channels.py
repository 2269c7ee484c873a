"""Normalisation of channels as functions: batch_norm, group_norm, instance_norm."""

from __future__ import annotations

import math
from typing import Any

from ddp._engine import no_grad
from ddp._tensor.base import apply, together, wrap
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.functional._norm import affine_dtype
from ddp.ops import norm_channels
from ddp.ops._op import widen


def check_channels(name: str, input: Tensor, *per_channel: Tensor | None) -> None:
    """Raises: ShapeError unless input is (N, C, ...) and the others are (C,)."""
    if input.ndim < 2:
        raise ShapeError(f"{name}: input {input.shape}: expected (N, C, ...)")
    for each in per_channel:
        if each is not None and tuple(each.shape) != (input.shape[1],):
            raise ShapeError(
                f"{name}: input {input.shape} has {input.shape[1]} channels, got one of shape {each.shape}"
            )


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias for each channel. input: (N, C, ...); the others: (C,).

    training: statistics are the batch's, and running ones (written in place) move towards them by `momentum`, the
    variance unbiased. Otherwise they are the running ones.

    Raises: ShapeError, also for one value a channel in training; DtypeError; DeviceError; ArgumentError without running
    statistics out of training. Source: Ioffe and Szegedy 2015, arXiv:1502.03167.
    """
    check_channels("batch_norm", input, running_mean, running_var, weight, bias)
    affine_dtype("batch_norm", input, weight, bias)
    if not training:
        if running_mean is None or running_var is None:
            raise ArgumentError("batch_norm: running_mean and running_var are needed out of training")
        where = {"mean": running_mean._array, "var": running_var._array}
        return apply(norm_channels.channel_affine, (input, weight, bias), eps=eps, **where)
    if input.shape[0] * math.prod(input.shape[2:]) == 1:
        raise ShapeError(f"batch_norm: input {input.shape} has one value a channel: training needs more")
    for each in (running_mean, running_var):
        if each is not None and each._device is not input._device:
            together("batch_norm", (input, each))
    tell = moving(running_mean, running_var, momentum) if input.numel() else None  # nothing has no statistics
    return apply(norm_channels.batch_norm, (input, weight, bias), eps=eps, tell=tell)


def moving(running_mean: Tensor | None, running_var: Tensor | None, momentum: float) -> Any:
    """What moves running statistics: called with means, biased variances, (C,) or (N, C), and what each was taken over.

    One number a sample is averaged over samples. None if there is nothing to move.
    """
    if running_mean is None and running_var is None:
        return None

    @no_grad()
    def move(mean: Any, var: Any, count: int) -> None:
        for running, value in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
            if running is not None:
                held = widen(running._array)
                value = value.reshape(-1, running.shape[0]).mean(axis=0)
                running.copy_(wrap(held + momentum * (value - held), running.device))

    return move


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias over groups of channels of each sample. input: (N, C, ...).

    weight, bias: (C,). Raises: ShapeError, also for one value a group; ArgumentError unless num_groups divides C;
    DtypeError. Source: Wu and He 2018, arXiv:1803.08494.
    """
    check_channels("group_norm", input, weight, bias)
    affine_dtype("group_norm", input, weight, bias)
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ArgumentError(f"group_norm: {num_groups} groups do not divide the {channels} channels of {input.shape}")
    if input.numel() and input.shape[0] * math.prod(input.shape[2:]) * channels == num_groups:
        raise ShapeError(f"group_norm: input {input.shape} has one value a group")
    return apply(norm_channels.group_norm, (input, weight, bias), groups=num_groups, eps=eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias over the positions of each channel of each sample.

    input: (N, C, ...); the others: (C,). use_input_stats: statistics are the input's, and running ones (written in
    place) move towards their means over samples by `momentum`. Otherwise they are the running ones.

    Raises: ShapeError, also for one position; DtypeError; ArgumentError without any statistics.
    Source: Ulyanov et al. 2016, arXiv:1607.08022.
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    check_channels("instance_norm", input, running_mean, running_var, weight, bias)
    affine_dtype("instance_norm", input, weight, bias)
    if math.prod(input.shape[2:]) == 1:
        raise ShapeError(f"instance_norm: input {input.shape} has one position: its own statistics need more")
    tell = moving(running_mean, running_var, momentum) if input.numel() else None
    return apply(norm_channels.group_norm, (input, weight, bias), groups=input.shape[1], eps=eps, tell=tell)
