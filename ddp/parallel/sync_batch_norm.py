"""SyncBatchNorm: BatchNorm over the batches of all ranks, as if they were one.

Statistics of a few samples are poor. So in forward the ranks exchange the number of values and the mean and variance of
each channel, and in backward two sums over the gradient for each channel. Each exchange is one collective. The one in
forward also shows all ranks whether any rank's input requires grad.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from numpy import errstate

import collectives
from collectives import Communicator
from ddp._engine import CollectiveNode, Node, modes
from ddp._tensor.base import keep_call, make_node, record, wrap
from ddp._tensor.core import Tensor
from ddp.errors import DeviceError, DtypeError, GraphError, ShapeError
from ddp.nn import Module
from ddp.nn.normalization import BatchNorm, running_stats_update
from ddp.nn.validation import check_channels
from ddp.ops.arrays import BFLOAT16, RecordingModule
from ddp.ops.normalization import ChannelGroups, batch_norm
from ddp.parallel.collectives import Array, CollectiveCall, all_reduce, tied

# A rank sends its mode to the others: it is under no_grad; its input requires no grad; its input requires grad.
_NO_GRAD, _GRAD, _WANTS = range(3)


class SyncBatchNorm(BatchNorm):
    """Normalizes each channel over the batches of all ranks, then applies weight and bias. input: (N, C, ...).

    weight, bias: (C,); eps, momentum, affine, track_running_stats: as in BatchNorm1d
    comm: the ranks' communicator; None: `collectives.init()`. Calls go over a duplicate of it, see `ddp.parallel`

    In training every rank must call it, even with an empty batch or under `no_grad`. If the input requires grad on one
    rank, the result requires it on all, and all must run backward from it. Batches may differ in all dimensions but C.
    Running statistics are equal on all ranks; their variance is the unbiased one of the whole batch. Gradients are
    those of the sum of all ranks' losses. Weight and bias get this rank's part of their gradient, as any parameter, and
    DataParallel averages the parts.

    In evaluation, and on one rank, it works like BatchNorm, without a collective. In forward the host reads the
    exchanged modes and numbers of values. On a GPU it has to wait for them.

    Raises, when called: ShapeError on every rank if the whole batch has one value in a channel; GraphError on every
    rank if one is under `no_grad` while the input of another requires grad; ShapeError, DtypeError, DeviceError on this
    rank for an input that does not fit.
    Source: arXiv:1502.03167; statistics are merged as in Chan, Golub, LeVeque 1983, doi:10.1080/00031305.1983.10483115.
    """

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
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self.comm = comm

    def _check(self, input: Tensor) -> None:
        """Checks that the input is (N, num_features, ...). Raises: ShapeError if it is not."""
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ShapeError(f"SyncBatchNorm: expected (N, {self.num_features}, ...), got shape {input.shape}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the input, in training by the statistics of all ranks' inputs. Collective in training."""
        if not self.training:
            return super().forward(input)
        comm = collectives.init() if self.comm is None else self.comm
        if comm.size == 1:
            return super().forward(input)
        call = CollectiveCall("SyncBatchNorm", input, comm)
        self._check(input)
        inputs = (input, self.weight, self.bias)
        check_channels("SyncBatchNorm", *inputs)
        if self.weight is not None and self.weight.device is not input.device:
            raise DeviceError(f"SyncBatchNorm: one tensor is on {input.device}, another on {self.weight.device}")
        mode = _NO_GRAD
        if modes.state.enabled:
            mode = _WANTS if input.requires_grad else _GRAD
        layout = WholeBatch(call, mode, comm)
        op = batch_norm.upcast if call.array.dtype is BFLOAT16 else batch_norm
        arrays = [None if x is None else x.array for x in inputs]
        with errstate(all="ignore"):  # infinities and nan are values
            out, residual = op.forward(call.xp, *arrays, eps=self.eps, tell=self._keep, layout=layout)
        result = wrap(out, input.device)
        if modes.state.enabled and (layout.collective or any(x is not None and x.edge is not None for x in inputs)):
            if layout.collective:
                backward = _SyncBatchNormBackward(op)
                node = make_node(CollectiveNode, backward, backward, call.xp, inputs, result, residual)
                keep_call(node, inputs, arrays, {"eps": self.eps, "tell": None, "layout": layout})
            else:
                node = make_node(Node, batch_norm, op, call.xp, inputs, result, residual)
            record(node, [result])
        return result

    def _keep(self, mean: Array, var: Array, count: int) -> None:
        """Counts the batch, and updates the running statistics."""
        momentum = self.count_batch()
        if self.track_running_stats:
            update = running_stats_update(self.running_mean, self.running_var, momentum)
            if update is not None:
                update(mean, var, count)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.comm)] = self.comm  # the copy uses the same communicator
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, comm: Communicator | None = None) -> Module:
        """Calls the function `convert_sync_batchnorm`. A class method, as in PyTorch."""
        return convert_sync_batchnorm(module, comm)


def convert_sync_batchnorm(module: Module, comm: Communicator | None = None) -> Module:
    """Changes every BatchNorm in `module`, of any subclass, into a SyncBatchNorm, in place. Returns `module`.

    comm: the communicator of these layers. They keep their parameters, buffers, hooks and training mode, so that an
    optimizer or a DataParallel that was made before stays valid. Layers that are SyncBatchNorm already do not change.

    Raises: DtypeError if `module` is not a Module.
    """
    if not isinstance(module, Module):
        raise DtypeError(f"convert_sync_batchnorm: expected a Module, got {type(module).__name__}")
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and not isinstance(layer, SyncBatchNorm):
            layer.__class__ = SyncBatchNorm
            layer.comm = comm
    return module


class WholeBatch(ChannelGroups):
    """Normalizes each channel over the samples of all ranks. Arrays hold the samples of this rank."""

    def __init__(self, call: CollectiveCall, mode: int, comm: Communicator) -> None:
        super().__init__(call.array.shape)
        self._given = comm
        self._comm = call.comm
        self._mode = mode

    # The whole batch, of which rank s has n_s values with mean m_s and squared deviations q_s:
    # n = sum n_s, m = sum n_s*m_s / n, q = sum (q_s + n_s*(m_s - m)^2)
    def statistics(self, xp: Any, x: Array) -> tuple[Array, Array]:
        """The means and the biased variances of the whole batch. x: (N, C, positions). Collective."""
        if isinstance(xp, RecordingModule):  # under create_graph, after a forward, which has set `count`
            (mean,) = self.collect(xp, x.sum(axis=2, dtype="float64") / self.count)
            return mean, *self.collect(xp, ((x - self.broadcast(xp, mean)) ** 2).sum(axis=2) / self.count)
        mean, var = super().statistics(xp, x)
        channels = len(mean)
        row = xp.empty(2 + 2 * channels)
        row[0] = self._mode
        row[1] = x.size // max(channels, 1)
        row[2:] = xp.concatenate([mean, var])
        table = self._comm.all_gather(row, lengths="equal").reshape(self._comm.size, -1)
        # Contiguous, because of CuPy's current stream: see `ddp._cuda.stream_order.StreamGuard`.
        modes_of_ranks, counts = xp.ascontiguousarray(table[:, :2].T).tolist()
        self.collective = _WANTS in modes_of_ranks
        if self.collective and _NO_GRAD in modes_of_ranks:
            raise GraphError(
                f"SyncBatchNorm: rank {modes_of_ranks.index(_NO_GRAD)} is under no_grad, where it would miss the "
                "backward that all ranks have to run: call it in the same grad mode on every rank"
            )
        total = int(sum(counts))
        if total == 1:
            raise ShapeError("SyncBatchNorm: all ranks together have one value a channel: training needs more")
        self.count = max(total, 1)
        weights = table[:, 1:2]
        means = table[:, 2 : 2 + channels]
        variances = table[:, 2 + channels :]
        # If all ranks have the same mean, the added terms are exactly 0, so the variance of a constant channel is 0.
        mean = means[0] + (weights * (means - means[0])).sum(axis=0) / self.count
        shifts = means - mean
        var = (weights * (variances + shifts * shifts)).sum(axis=0) / self.count
        return mean, var

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        """Adds up each of `sums`, (N, C), over the samples of all ranks. Returns (C,) for each. Collective."""
        local = xp.stack(super().collect(xp, *sums))
        if isinstance(xp, RecordingModule):
            return [type(local)(total) for total in all_reduce(local.tensor, "sum", self._given)]
        return list(self._comm.all_reduce(local))


class _SyncBatchNormBackward:
    """The op whose backward the graph runs if the input of any rank requires grad."""

    name = "sync_batch_norm"
    saves = batch_norm.saves
    grad_out = False

    def __init__(self, op: Any) -> None:
        self._op = op

    def plan(self, needs: tuple[bool, ...]) -> Sequence[int | None]:
        """Saves x and weight in any case: this rank computes sums from them for the gradients of other ranks' x."""
        return batch_norm.plan((True, True, True))

    def backward(self, xp: Any, g: Array | None, needs: Any, saved: Any, residual: Any) -> Sequence[Any]:
        if g is None:  # no gradient on this rank, but the other ranks call the collective
            g = xp.zeros_like(saved[self.saves.index("x")])
        gradients: Sequence[Any] = self._op.backward(xp, g, needs, saved, residual)
        return gradients

    def record_backward(self, node: Node, g: Tensor | None, needs: Any) -> Any:
        """Returns gradients with a graph.

        The gradient of x is computed even if only other ranks need the gradient of their x.
        """
        from ddp._tensor.create_graph import run_reference  # imported late: few trainings need it

        return run_reference(node, self._op, tied(node, node.saved[1], g), (True, *needs[1:]))
