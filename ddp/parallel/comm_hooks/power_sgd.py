"""PowerSGD: a matrix of gradients is nearly of low rank, and two thin factors approximate it.

For each matrix M (rows, columns), the sum of the ranks' M_r (see `error_feedback`), and the last step's Q (columns,
rank):

    P_r = M_r Q        P = sum of P_r over ranks, orthonormalised     first call
    Q_r = M_r' P       Q = sum of Q_r over ranks                      second call
    gradient = P Q'    left out on rank r: M_r - P Q_r'

This is one step of subspace iteration; Q passes from step to step (warm start). P_r and Q_r are linear in M_r, so their
sums over ranks are M Q and M' P. The result is the same whether the samples are on one rank or on many.

All matrices of a bucket share each call. Gradients that are not worth compressing (of biases, of small matrices) are
sent with the first call, exactly. The first Q is drawn from a seed that depends on the parameter's name. So it need not
be sent, and does not depend on the bucket plan.

Each rank computes the basis and the products itself. So the results of machines with different linear algebra libraries
may differ in the last bits. DataParallel's checksum of the parameters finds such differences.

Source: Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np

from ddp._device import device_of, to_device
from ddp._tensor.dtypes import is_count
from ddp.errors import ArgumentError, StateDictError
from ddp.ops.products import product
from ddp.parallel.comm_hooks.error_feedback import add_residual, arrays, check_keys, tensors, working_dtype
from ddp.parallel.comm_hooks.grad_bucket import GradBucket, Steps

Array = Any  # numpy.ndarray or cupy.ndarray


@dataclass(eq=False)
class PowerSGD:
    """A communication hook that sends low-rank factors of gradients. Each model on each rank needs its own object.

    All ranks give the same arguments.

    matrix_approximation_rank: columns of P and Q, fewer if a matrix is smaller; usually 1 to 4
    start_iter: how many steps are reduced exactly first, while gradients are large and change quickly
    min_compression_rate: a matrix is compressed if rows * columns is more than this times (rows + columns) * rank

    The part that is left out is kept (as much memory as the gradients take), and sent later. A gradient of more than
    two dimensions counts as a matrix with shape[0] rows. 16-bit gradients are compressed in float32. If a matrix
    contains infinities or NaN, the part that was left out of it is dropped.

    Raises: ArgumentError unless the rank is a whole number of at least 1, start_iter a whole number of at least 0, and
    min_compression_rate a number of at least 0; DtypeError, in backward, for gradients that are not real.
    """

    matrix_approximation_rank: int = 1
    start_iter: int = 10
    _: KW_ONLY
    min_compression_rate: float = 2.0
    steps: int = field(default=0, init=False)  # the number of steps that have begun

    def __post_init__(self) -> None:
        rank = self.matrix_approximation_rank
        start = self.start_iter
        rate: Any = self.min_compression_rate
        valid_rate = isinstance(rate, Real) and not isinstance(rate, bool) and float(rate) >= 0
        if not (is_count(rank, 1) and is_count(start) and valid_rate):
            raise ArgumentError(
                "PowerSGD: expected a whole rank of at least 1, a whole start_iter and a min_compression_rate of at "
                f"least 0, got {rank!r:.60}, {start!r:.60} and {rate!r:.60}"
            )
        self._residuals: dict[str, Array] = {}
        self._queries: dict[str, Array] = {}  # the last Q of each matrix

    @property
    def same_on_all_ranks(self) -> dict[str, Any]:
        """The values that must be equal on all ranks, by name: the arguments, and how many steps have begun."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    def __call__(self, bucket: GradBucket) -> Steps:
        if bucket.index == 0:
            self.steps += 1
        if self.steps <= self.start_iter:
            yield bucket.comm.all_reduce(bucket.buffer, scale=bucket.scale, out=bucket.buffer, async_op=True)
            return
        xp = device_of(bucket.buffer).xp
        pairs = list(zip(bucket.names, bucket.gradients, strict=True))
        thin = [(name, g, rank) for name, g in pairs if (rank := self.rank_of(g.shape)) is not None]
        used = dict(zip(bucket.names, bucket.used, strict=True))
        exact = [g for _, g in pairs if self.rank_of(g.shape) is None]
        dtype = working_dtype(bucket.buffer)
        matrices = [add_residual(self._residuals, name, g, bucket.scale).reshape(len(g), -1) for name, g, _ in thin]
        queries = [self._query(name, m, rank) for m, (name, _, rank) in zip(matrices, thin, strict=True)]

        shapes = [(len(m), rank) for m, (_, _, rank) in zip(matrices, thin, strict=True)]
        message, parts = _joined(shapes + [g.shape for g in exact], dtype, xp.empty)
        for m, query, part in zip(matrices, queries, parts[: len(thin)], strict=True):
            product(xp, m, query, part)
        for gradient, part in zip(exact, parts[len(thin) :], strict=True):
            xp.multiply(gradient, bucket.scale, out=part, dtype=dtype)
        yield bucket.comm.all_reduce(message, out=message, async_op=True)
        for gradient, part in zip(exact, parts[len(thin) :], strict=True):
            gradient[...] = part
        if not thin:
            return

        # Householder's QR gives an orthonormal basis even for P = 0. So a step without gradients, which leaves Q = 0,
        # does no harm.
        bases = [xp.linalg.qr(part)[0].astype(dtype, copy=False) for part in parts[: len(thin)]]
        message, parts = _joined([query.shape for query in queries], dtype, xp.empty)
        for m, basis, part in zip(matrices, bases, parts, strict=True):
            product(xp, m.T, basis, part)
        total = yield bucket.comm.all_reduce(message, async_op=True)

        _, sums = _joined([query.shape for query in queries], dtype, lambda length, dtype: total)
        for (name, gradient, _), m, basis, part, query in zip(thin, matrices, bases, parts, sums, strict=True):
            gradient[...] = product(xp, basis, query.T).reshape(gradient.shape)
            if used[name]:
                m -= product(xp, basis, part.T)
            self._queries[name] = xp.nan_to_num(query, nan=0.0, posinf=0.0, neginf=0.0)

    def rank_of(self, shape: Sequence[int]) -> int | None:
        """The rank to which a gradient of that shape is compressed; None if it is not compressed."""
        if len(shape) < 2 or 0 in shape:
            return None
        rows = shape[0]
        columns = math.prod(shape[1:])
        rank = min(rows, columns, self.matrix_approximation_rank)
        return rank if rows * columns > self.min_compression_rate * (rows + columns) * rank else None

    def state_dict(self) -> dict[str, Any]:
        """{"steps", "queries": Q by name, "errors": what this rank left out, by name}. Errors differ on each rank."""
        return {"steps": self.steps, "queries": tensors(self._queries), "errors": tensors(self._residuals)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a result of `state_dict`. Steps and queries must be equal on all ranks; errors are those of this rank.

        To continue on another number of ranks without a loss, add the errors of each saved rank to those of one rank.

        Raises: StateDictError if it is not what `state_dict` returns; then nothing has changed.
        """
        check_keys("PowerSGD", state_dict, ["steps", "queries", "errors"])
        steps = state_dict["steps"]
        if not is_count(steps):
            raise StateDictError(f"PowerSGD: expected a whole number of steps, at least 0, got {steps!r:.60}")
        queries = arrays("PowerSGD: queries", state_dict["queries"])
        self._residuals = arrays("PowerSGD: errors", state_dict["errors"])
        self._queries = queries
        self.steps = int(steps)

    def _query(self, name: str, matrix: Array, rank: int) -> Array:
        """The Q (columns, rank) with which the step begins: the last Q, or random numbers that all ranks draw alike."""
        shape = (matrix.shape[1], rank)
        known = self._queries.get(name)
        if known is None or known.shape != shape:  # no Q yet, or one of another shape
            known = np.random.default_rng([0, zlib.crc32(name.encode()), 0]).standard_normal(shape)
        return to_device(known, device_of(matrix)).astype(matrix.dtype, copy=False)


def _joined(
    shapes: Sequence[tuple[int, ...]], dtype: Any, make: Callable[[int, Any], Array]
) -> tuple[Array, list[Array]]:
    """Makes one array with room for arrays of these shapes, one after the other. Returns it and its views.

    make: called with the length and the dtype, returns the array
    """
    whole = make(sum(map(math.prod, shapes)), dtype)
    views = []
    start = 0
    for shape in shapes:
        stop = start + math.prod(shape)
        views.append(whole[start:stop].reshape(shape))
        start = stop
    return whole, views
