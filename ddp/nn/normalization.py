"""Normalization of rows and of channels: layer, RMS, group, batch and instance norm."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ddp._engine import no_grad
from ddp._tensor.base import apply, to_common_device, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import ones, zeros
from ddp._tensor.operands import parse_sizes
from ddp._tensor.reductions import required_float, resolve_axis
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import init
from ddp.nn.module import Layer
from ddp.nn.parameter import Parameter
from ddp.nn.validation import affine_dtype, check_channels
from ddp.ops import normalization
from ddp.ops.arrays import from_bfloat16

# The machine epsilon, by dtype. Other dtypes have float32's, because 16-bit types are normalised in float32.
_EPSILON = {"float64": 2.0**-52}


def _check_trailing(name: str, input: Tensor, normalized_shape: Sequence[int], *parameters: Tensor | None) -> int:
    """Returns the number of axes to normalise over. Raises: ShapeError, DtypeError."""
    shape = tuple(normalized_shape)
    whole = input.array.shape
    if not shape or len(whole) < len(shape) or whole[len(whole) - len(shape) :] != shape:
        raise ShapeError(f"{name}: input {input.shape} does not end in normalized_shape {shape}")
    for parameter in parameters:
        if parameter is not None and parameter.array.shape != shape:
            raise ShapeError(f"{name}: weight or bias {parameter.shape} for normalized_shape {shape}")
    affine_dtype(name, input, *parameters)
    return len(shape)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias, over the last axes. input: (..., *normalized_shape).

    weight, bias: of normalized_shape. The variance is the biased one. Raises: ShapeError, DtypeError.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    axes = _check_trailing("layer_norm", input, normalized_shape, weight, bias)
    return apply(normalization.layer_norm, (input, weight, bias), axes=axes, eps=eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """input / sqrt(mean of squares + eps) * weight, over the last axes. input: (..., *normalized_shape).

    weight: of normalized_shape; eps: None means the machine epsilon of the dtype (float32's for 16-bit types).
    Raises: ShapeError, DtypeError. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    axes = _check_trailing("rms_norm", input, normalized_shape, weight)
    if eps is None:
        eps = _EPSILON.get(input.dtype.name, 2.0**-23)
    return apply(normalization.rms_norm, (input, weight), axes=axes, eps=eps)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """input / max(its p-norm along `dim`, eps). input: any shape with a dimension `dim`; p: a number, inf or -inf.

    Raises: RangeError, DtypeError.
    """
    axis = resolve_axis(required_float(input, "normalize"), dim, "normalize")
    if not input.ndim:
        return normalize(input.reshape(1), p, 0, eps).reshape(())
    if not p > 0:  # the op has a backward only for p > 0
        return input / input.norm(p, axis, keepdim=True).clamp_min(eps)
    return apply(normalization.normalize, (input,), p=float(p), dim=axis, eps=eps)


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

    training: mean and var are those of the batch, and running_mean and running_var move by `momentum`, in place,
    towards the mean and the unbiased variance. Otherwise, mean and var are running_mean and running_var.

    Raises: ShapeError for shapes that do not fit, or one value per channel in training; DtypeError; DeviceError;
    ArgumentError if `training` is False and running_mean or running_var is missing.
    Source: Ioffe and Szegedy 2015, arXiv:1502.03167.
    """
    check_channels("batch_norm", input, weight, bias, statistics=(running_mean, running_var))
    if not training:
        if running_mean is None or running_var is None:
            raise ArgumentError("batch_norm: running_mean and running_var are needed out of training")
        statistics = {"mean": running_mean.array, "var": running_var.array}
        return apply(normalization.channel_affine, (input, weight, bias), eps=eps, **statistics)
    if input.shape[0] * math.prod(input.shape[2:]) == 1:
        raise ShapeError(f"batch_norm: input {input.shape} has one value a channel: training needs more")
    for statistic in (running_mean, running_var):
        if statistic is not None and statistic.device is not input.device:
            to_common_device("batch_norm", (input, statistic))
    # An empty input has no statistics.
    tell = running_stats_update(running_mean, running_var, momentum) if input.numel() else None
    return apply(normalization.batch_norm, (input, weight, bias), eps=eps, tell=tell)


#: Updates of running statistics that are still to be made: (running_mean, means, biased variances, values per mean).
RecordedStatistics = list[tuple[Tensor | None, Any, Any, int]]


class _DeferredStatistics(threading.local):
    """Whether this thread defers updates of running statistics.

    records: None: updates are made at once; a list: updates are appended to the list instead
    """

    records: RecordedStatistics | None = None

    @contextlib.contextmanager
    def into(self, records: RecordedStatistics) -> Iterator[None]:
        """Inside this context, updates are appended to `records`. The caller makes them later."""
        before = self.records
        self.records = records
        try:
            yield
        finally:
            self.records = before


deferred = _DeferredStatistics()


def running_stats_update(running_mean: Tensor | None, running_var: Tensor | None, momentum: float) -> Any:
    """Makes a function of (means, biased variances, number of values of each) that moves the running statistics.

    Means and variances: (C,), or (N*C,), which are averaged over the N samples. Inside `deferred.into`, the function
    only records the update. Returns None if neither running_mean nor running_var is given.
    """
    if running_mean is None and running_var is None:
        return None
    if (records := deferred.records) is not None:
        return lambda mean, var, count: records.append((running_mean, mean, var, count))

    @no_grad()
    def move(mean: Any, var: Any, count: int) -> None:
        for running, value in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
            if running is not None:
                before = from_bfloat16(running.device.xp, running.array)
                value = value.reshape(-1, running.shape[0]).mean(axis=0)
                # Not `before + momentum*(value - before)`: there, infinities would become nan.
                running.copy_(wrap((1 - momentum) * before + momentum * value, running.device))

    return move


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias over groups of channels of each sample. input: (N, C, ...).

    weight, bias: (C,). Raises: ShapeError for shapes that do not fit, or a single sample with one value per group;
    ArgumentError unless num_groups divides C; DtypeError. Source: Wu and He 2018, arXiv:1803.08494.
    """
    check_channels("group_norm", input, weight, bias)
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ArgumentError(f"group_norm: {num_groups} groups do not divide the {channels} channels of {input.shape}")
    if input.numel() and input.shape[0] * math.prod(input.shape[2:]) * channels == num_groups:
        raise ShapeError(f"group_norm: input {input.shape} has one value a group")
    return apply(normalization.group_norm, (input, weight, bias), groups=num_groups, eps=eps)


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

    input: (N, C, ...); the others: (C,). use_input_stats: mean and var are those of the input, and running_mean and
    running_var move by `momentum`, in place, towards the averages over samples of the mean and the unbiased variance.
    Otherwise, mean and var are running_mean and running_var.

    Raises: ShapeError for shapes that do not fit, or a single position if use_input_stats; DtypeError; ArgumentError if
    use_input_stats is False and running_mean or running_var is missing.
    Source: Ulyanov et al. 2016, arXiv:1607.08022.
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    check_channels("instance_norm", input, weight, bias, statistics=(running_mean, running_var))
    if math.prod(input.shape[2:]) == 1:
        raise ShapeError(f"instance_norm: input {input.shape} has one position: its own statistics need more")
    tell = running_stats_update(running_mean, running_var, momentum) if input.numel() else None
    return apply(normalization.group_norm, (input, weight, bias), groups=input.shape[1], eps=eps, tell=tell)


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return parse_sizes((normalized_shape,))


class _Norm(Layer):
    """The base of all norm layers: a weight, and a bias except in RMSNorm."""

    def _register_affine(
        self, shape: tuple[int, ...], weight: bool, bias: bool | None, device: Any, dtype: Any
    ) -> None:
        """Registers weight and bias, as None if the argument is False. bias=None: registers no bias at all."""
        like = {"device": device, "dtype": dtype}
        self.register_parameter("weight", Parameter(ones(shape, **like)) if weight else None)
        if bias is not None:
            self.register_parameter("bias", Parameter(zeros(shape, **like)) if bias else None)

    def reset_parameters(self) -> None:
        """Sets weights to 1, and biases to 0."""
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            parameter = self._parameters.get(name)
            if parameter is not None:
                init.constant_(parameter, value)


class LayerNorm(_Norm, shown="normalized_shape eps= elementwise_affine= bias="):
    """Normalises the last axes of every sample to mean 0 and variance 1, then applies weight and bias.

    input: (..., *normalized_shape). weight, bias: of normalized_shape.

    Raises: ShapeError, DtypeError when called; see functional.layer_norm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self._register_affine(self.normalized_shape, elementwise_affine, elementwise_affine and bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., *normalized_shape)."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(_Norm, shown="normalized_shape eps= elementwise_affine="):
    """Normalises the last axes of every sample to a root mean square of 1, then applies the weight.

    input: (..., *normalized_shape). weight: of normalized_shape.

    Raises: ShapeError, DtypeError when called; see functional.rms_norm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self._register_affine(self.normalized_shape, elementwise_affine, None, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., *normalized_shape)."""
        return rms_norm(input, self.normalized_shape, self.weight, self.eps)


class GroupNorm(_Norm, shown="num_groups num_channels eps= affine= bias="):
    """Normalises groups of channels of every sample to mean 0 and variance 1, then applies weight and bias.

    input: (N, C, ...). weight, bias: (num_channels,). Raises: ArgumentError unless num_groups divides num_channels;
    ShapeError, DtypeError when called; see functional.group_norm.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(f"GroupNorm: {num_groups} groups do not divide {num_channels} channels")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        self._register_affine((num_channels,), affine, affine and bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...)."""
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _ChannelNorm(_Norm, shown="num_features eps= momentum= affine= bias= track_running_stats="):
    """The base of batch and instance norm: parameters and running statistics, all of shape (C,).

    The statistics and the number of batches are buffers.
    """

    _ranks: ClassVar[tuple[int, ...]]  # numbers of dimensions that an input may have

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self._register_affine((num_features,), affine, affine and bias, device, dtype)
        kept = track_running_stats
        like = {"device": device, "dtype": dtype}
        self.register_buffer("running_mean", zeros(num_features, **like) if kept else None)
        self.register_buffer("running_var", ones(num_features, **like) if kept else None)
        self.register_buffer("num_batches_tracked", zeros((), dtype="int64", device=device) if kept else None)

    @no_grad()
    def reset_running_stats(self) -> None:
        """Sets running means to 0, running variances to 1, and the number of batches to 0."""
        if self.running_mean is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Resets the running statistics, and sets weights to 1 and biases to 0."""
        self.reset_running_stats()
        super().reset_parameters()

    def _check(self, input: Tensor) -> None:
        """Raises: ShapeError unless the input has a number of dimensions that this layer takes."""
        if input.ndim not in self._ranks:
            wanted = " or ".join(f"{rank}-d" for rank in self._ranks)
            raise ShapeError(f"{type(self).__name__}: expected {wanted} input, got shape {input.shape}")


class BatchNorm(_ChannelNorm):
    """The base of the batch norm layers."""

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...). Its own statistics are used in training, and if there are no running statistics."""
        self._check(input)
        momentum = self.count_batch() if self.training else 0.0
        own = self.training or self.running_mean is None
        keep = not own or (self.training and self.track_running_stats)
        mean, var = (self.running_mean, self.running_var) if keep else (None, None)
        return batch_norm(input, mean, var, self.weight, self.bias, own, momentum, self.eps)

    def count_batch(self) -> float:
        """Counts one more batch, and returns the `momentum` for it."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1 / self.num_batches_tracked.item()
        return momentum


class BatchNorm1d(BatchNorm, ranks=(2, 3)):
    """Normalises each channel over the batch to mean 0 and variance 1, then applies weight and bias.

    input: (N, C) or (N, C, L). weight, bias: (C,).

    In training, running_mean and running_var move by `momentum` towards the batch's mean and variance. With
    momentum=None, they are the averages over all batches. Evaluation normalises by running_mean and running_var.
    Without track_running_stats, it normalises by the batch's mean and variance, as training does.

    Raises when called: DtypeError; ShapeError for a shape that does not fit, or if the batch's mean and variance are
    used and there is one value per channel. Source: Ioffe and Szegedy 2015, arXiv:1502.03167.
    """


class BatchNorm2d(BatchNorm, ranks=(4,)):
    """Normalises each channel over the batch to mean 0 and variance 1, then applies weight and bias.

    input: (N, C, H, W). weight, bias: (C,). Statistics and errors: as in BatchNorm1d.
    """


class BatchNorm3d(BatchNorm, ranks=(5,)):
    """Normalises each channel over the batch to mean 0 and variance 1, then applies weight and bias.

    input: (N, C, D, H, W). weight, bias: (C,). Statistics and errors: as in BatchNorm1d.
    """


class _InstanceNorm(_ChannelNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...) or (C, ...)."""
        self._check(input)
        single = input.ndim == self._ranks[0]
        batch = input.unsqueeze(0) if single else input
        if self.affine and batch.shape[1] != self.num_features:
            raise ShapeError(
                f"{type(self).__name__}: input {input.shape} has {batch.shape[1]} channels, not {self.num_features}"
            )
        own = self.training or not self.track_running_stats
        momentum = self.momentum or 0.0
        out = instance_norm(batch, self.running_mean, self.running_var, self.weight, self.bias, own, momentum, self.eps)
        return out.squeeze(0) if single else out


class InstanceNorm1d(_InstanceNorm, ranks=(2, 3)):
    """Normalises each channel of each sample to mean 0 and variance 1, then applies weight and bias.

    input: (N, C, L) or (C, L). weight, bias: (C,), only if `affine`.

    Running statistics are kept only with track_running_stats. Evaluation then uses them.

    Raises when called: DtypeError; ShapeError for a shape that does not fit, or for one position without running
    statistics.
    Source: Ulyanov et al. 2016, arXiv:1607.08022.
    """


class InstanceNorm2d(_InstanceNorm, ranks=(3, 4)):
    """Normalises each channel of each sample to mean 0 and variance 1, then applies weight and bias.

    input: (N, C, H, W) or (C, H, W). Other arguments and errors: as in InstanceNorm1d.
    """
