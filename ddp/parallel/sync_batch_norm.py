"""SyncBatchNorm: BatchNorm over the batches of all ranks, as if they were one.

A few samples a rank make poor statistics. So the ranks exchange count, mean and sum of squared deviations of
each channel, in forward, and two sums of the gradient, in backward. That is one collective each; what else they have
to agree on (does any rank want a gradient, how many samples are there) rides in the first.
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

_NO_GRAD, _GRAD, _WANTS = 0, 1, 2  # of a rank: its grad mode, and whether its input requires grad


class SyncBatchNorm(BatchNorm):
    """Mean 0 and variance 1 for each channel over the batches of all ranks, then weight and bias. input: (N, C, ...).

    weight, bias: (C,); eps, momentum, affine, track_running_stats: as in BatchNorm1d
    comm: the ranks; None: `collectives.init()`. Calls go over a duplicate of it, see `ddp.parallel`.

    In training every rank has to call it, also with an empty batch and under `no_grad`, and if the input requires grad
    on one rank, the result does on all, which then have to run backward from it. Batches may differ in all but their
    channels. Running statistics come out the same on every rank; their variance is the unbiased one of the whole batch.
    Gradients are those of the sum of all ranks' losses; weight and bias get this rank's part of theirs, as any
    parameter, and DataParallel adds the parts up.

    In evaluation nothing is called, nor on one rank: there it is BatchNorm. In forward the host reads what the ranks
    exchanged, for which on a GPU it has to wait.

    Raises, when called: ShapeError on every rank if the whole batch has one value a channel; GraphError on every rank
    if one is under `no_grad` where the input of another requires grad; ShapeError, DtypeError, DeviceError on this
    rank for an input that does not fit.
    Source: arXiv:1502.03167; statistics are joined by Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
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
        """Raises: ShapeError unless the input is (N, num_features, ...)."""
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ShapeError(f"SyncBatchNorm: expected (N, {self.num_features}, ...), got shape {input.shape}")

    def forward(self, input: Tensor) -> Tensor:
        """input: (N, C, ...), normalised by the statistics of all ranks' inputs in training. Collective in training."""
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
        mode = _NO_GRAD if not modes.state.enabled else _WANTS if input.requires_grad else _GRAD
        layout = WholeBatch(call, mode, comm)
        op = batch_norm.upcast if call.array.dtype is BFLOAT16 else batch_norm
        arrays = [None if x is None else x.array for x in inputs]
        with errstate(all="ignore"):  # infinities and nan are values
            out, residual = op.forward(call.xp, *arrays, eps=self.eps, tell=self._keep, layout=layout)
        result = wrap(out, input.device)
        if modes.state.enabled and (layout.collective or any(x is not None and x.edge is not None for x in inputs)):
            if layout.collective:
                run = _SyncBatchNormBackward(op)
                node = make_node(CollectiveNode, run, run, call.xp, inputs, result, residual)
                keep_call(node, inputs, arrays, {"eps": self.eps, "tell": None, "layout": layout})
            else:
                node = make_node(Node, batch_norm, op, call.xp, inputs, result, residual)
            record(node, [result])
        return result

    def _keep(self, mean: Array, var: Array, count: int) -> None:
        """Moves the running statistics."""
        momentum = self.count_batch()
        if self.track_running_stats:
            update = running_stats_update(self.running_mean, self.running_var, momentum)
            if update is not None:
                update(mean, var, count)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # A copy of the layer speaks to the same ranks; a communicator has no copy.
        memo[id(self.comm)] = self.comm
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, comm: Communicator | None = None) -> Module:
        """As the function of that name; PyTorch has it here."""
        return convert_sync_batchnorm(module, comm)


def convert_sync_batchnorm(module: Module, comm: Communicator | None = None) -> Module:
    """Makes a SyncBatchNorm of every BatchNorm in `module`, subclasses too, where it stands; returns `module`.

    comm: that of these layers. They keep their parameters, buffers, hooks and training mode: an optimizer or a
    DataParallel made before goes on with them.

    Raises: DtypeError for what is no module.
    """
    if not isinstance(module, Module):
        raise DtypeError(f"convert_sync_batchnorm: expected a Module, got {type(module).__name__}")
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and not isinstance(layer, SyncBatchNorm):
            layer.__class__ = SyncBatchNorm
            layer.comm = comm
    return module


class WholeBatch(ChannelGroups):
    """The layout of a batch that lies on all ranks: a channel of all samples of all of them is normalised together."""

    def __init__(self, call: CollectiveCall, mode: int, comm: Communicator) -> None:
        super().__init__(call.array.shape)
        self._given = comm
        self._comm = call.comm
        self._mode = mode

    # Of the whole batch, of n_s elements with mean m_s and squared deviations q_s on rank s:
    # n = sum n_s, m = sum n_s*m_s / n, q = sum (q_s + n_s*(m_s - m)^2)
    def statistics(self, xp: Any, x: Array) -> tuple[Array, Array]:
        """The means, and the biased variances, the same on every rank. x: (N, C, positions). Collective."""
        if isinstance(xp, RecordingModule):  # under create_graph, where `count` is known
            (mean,) = self.collect(xp, x.sum(axis=2, dtype="float64") / self.count)
            return mean, *self.collect(xp, ((x - self.broadcast(xp, mean)) ** 2).sum(axis=2) / self.count)
        mean, var = super().statistics(xp, x)
        channels = len(mean)
        mine = xp.empty(2 + 2 * channels)
        mine[0], mine[1] = self._mode, x.size // max(channels, 1)
        mine[2 : 2 + channels] = mean
        mine[2 + channels :] = var
        table = self._comm.all_gather(mine, lengths="equal").reshape(self._comm.size, -1)
        modes_of_ranks, counts = xp.ascontiguousarray(table[:, :2].T).tolist()  # contiguous: see `StreamGuard`
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
        counted, means, variances = table[:, 1:2], table[:, 2 : 2 + channels], table[:, 2 + channels :]
        # What is added up is 0 where all ranks have one mean, and a constant channel's variance stays 0.
        mean = means[0] + (counted * (means - means[0])).sum(axis=0) / self.count
        shifts = means - mean
        var = (counted * (variances + shifts * shifts)).sum(axis=0) / self.count
        return mean, var

    def collect(self, xp: Any, *sums: Array) -> Sequence[Array]:
        """The statistics of sums of rows, over all ranks. Collective."""
        local = xp.stack(super().collect(xp, *sums))
        if isinstance(xp, RecordingModule):
            return [type(local)(each) for each in all_reduce(local.tensor, "sum", self._given)]
        return list(self._comm.all_reduce(local))


class _SyncBatchNormBackward:
    """The op as the engine sees it, where the input of any rank requires grad."""

    name = "sync_batch_norm"
    saves = batch_norm.saves
    into = False

    def __init__(self, op: Any) -> None:
        self._op = op

    def plan(self, needs: tuple[bool, ...]) -> Sequence[int | None]:
        """The gradient that comes here counts for the inputs of other ranks, whatever is wanted on this one."""
        return batch_norm.plan((True, True, True))

    def backward(self, xp: Any, g: Array | None, needs: Any, saved: Any, residual: Any) -> Sequence[Any]:
        if g is None:  # the other ranks call the collective all the same
            g = xp.zeros_like(saved[self.saves.index("x")])
        gradients: Sequence[Any] = self._op.backward(xp, g, needs, saved, residual)
        return gradients

    def record_backward(self, node: Node, g: Tensor | None, needs: Any) -> Any:
        """Gradients with a graph, that of x also where only other ranks want theirs."""
        from ddp._tensor.create_graph import run_reference  # of use to few trainings

        return run_reference(node, self._op, tied(node, node.saved[1], g), (True, *needs[1:]))
