"""Normalisation layers that may keep running statistics: BatchNorm and InstanceNorm."""

from __future__ import annotations

from typing import Any

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp._tensor.creation import ones, zeros
from ddp.errors import ShapeError
from ddp.nn import functional, init
from ddp.nn._module import Module, Parameter


class _ChannelNorm(Module):
    """Parameters and running statistics, (C,) each; these are buffers, as is how many batches they have seen."""

    ranks: tuple[int, ...]  # numbers of dimensions that an input may have

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: Any,
        dtype: Any,
        bias: bool,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        like = {"device": device, "dtype": dtype}
        self.register_parameter("weight", Parameter(ones(num_features, **like)) if affine else None)
        self.register_parameter("bias", Parameter(zeros(num_features, **like)) if affine and bias else None)
        kept = track_running_stats
        self.register_buffer("running_mean", zeros(num_features, **like) if kept else None)
        self.register_buffer("running_var", ones(num_features, **like) if kept else None)
        self.register_buffer("num_batches_tracked", zeros((), dtype="int64", device=device) if kept else None)

    @no_grad()
    def reset_running_stats(self) -> None:
        """Running means become 0, variances 1, and no batch has been seen."""
        if self.running_mean is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Forgets the running statistics; weights become 1, biases 0."""
        self.reset_running_stats()
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def _check(self, input: Tensor) -> None:
        """Raises: ShapeError unless the input has a number of dimensions that this layer takes."""
        if input.ndim not in self.ranks:
            wanted = " or ".join(f"{rank}-d" for rank in self.ranks)
            raise ShapeError(f"{type(self).__name__}: expected {wanted} input, got shape {input.shape}")

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"bias={self.bias is not None}, track_running_stats={self.track_running_stats}"
        )


class BatchNorm(_ChannelNorm):
    """What the layers of the name have in common."""

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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...), normalised by its own statistics in training or where none are kept."""
        self._check(input)
        momentum = self._moved() if self.training else 0.0
        own = self.training or self.running_mean is None
        keep = not own or (self.training and self.track_running_stats)
        return functional.batch_norm(
            input,
            self.running_mean if keep else None,
            self.running_var if keep else None,
            self.weight,
            self.bias,
            own,
            momentum,
            self.eps,
        )

    def _moved(self) -> float:
        """Counts one more batch; how far running statistics move towards its own."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1 / self.num_batches_tracked.item()
        return momentum


class BatchNorm1d(BatchNorm):
    """Mean 0 and variance 1 for each channel over the batch, then weight and bias. input: (N, C) or (N, C, L).

    weight, bias: (C,). In training, running_mean and running_var move towards the batch's by `momentum` (None: they
    are the averages over all batches), and stand in for them in evaluation; without track_running_stats the batch's
    serve in both.

    Raises: ShapeError when called, also for one value a channel in training. Source: arXiv:1502.03167.
    """

    ranks = (2, 3)


class BatchNorm2d(BatchNorm):
    """Mean 0 and variance 1 for each channel over the batch, then weight and bias. input: (N, C, H, W).

    weight, bias: (C,). Statistics and errors are those of BatchNorm1d.
    """

    ranks = (4,)


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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias)

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...) or (C, ...)."""
        self._check(input)
        single = input.ndim == self.ranks[0]
        batch = input.unsqueeze(0) if single else input
        if self.affine and batch.shape[1] != self.num_features:
            raise ShapeError(
                f"{type(self).__name__}: input {input.shape} has {batch.shape[1]} channels, not {self.num_features}"
            )
        out = functional.instance_norm(
            batch,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )
        return out.squeeze(0) if single else out


class InstanceNorm1d(_InstanceNorm):
    """Mean 0 and variance 1 for each channel of each sample, then weight and bias. input: (N, C, L) or (C, L).

    weight, bias: (C,), there if `affine`. Running statistics are kept only with track_running_stats.

    Raises: ShapeError when called, also for one position. Source: Ulyanov et al. 2016, arXiv:1607.08022.
    """

    ranks = (2, 3)


class InstanceNorm2d(_InstanceNorm):
    """Mean 0 and variance 1 for each channel of each sample, then weight and bias. input: (N, C, H, W) or (C, H, W).

    As InstanceNorm1d.
    """

    ranks = (3, 4)
