"""`ZeroOptimizer`: every rank holds the optimizer state of one part of the parameters, and updates that part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy import errstate

from ddp._device import capturing, device_of, on, to_device
from ddp._engine import enable_grad
from ddp._engine.grad_buffer import FULL
from ddp._tensor.base import wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import from_foreign
from ddp.errors import ArgumentError, CaptureError, DtypeError, ParallelError
from ddp.nn.utils.clip_grad import norm_order
from ddp.ops import gradients
from ddp.optim import Optimizer
from ddp.optim.optimizer import Closure, Group, Params
from ddp.parallel.data_parallel import DataParallel
from ddp.parallel.exchange import AllReduce, SingleRank
from ddp.parallel.micro_batches import TreeExchange
from ddp.parallel.zero.shards import FindState, ShardedExchange, StatePiece, WholeGradientExchange


class ZeroOptimizer(Optimizer):
    """An optimizer whose state is sharded over the ranks of a DataParallel: ZeRO, stage 1.

    model: its gradients are reduce-scattered from now on: each rank gets the mean of its own part. With micro_batches
    each rank still gets the whole mean
    optimizer_class: any optimizer of `ddp.optim`, or another one whose update is elementwise and which keeps its state
    in `self.state[p]`. It gets flat pieces of parameters. A parameter of one element keeps its shape
    params: the model's parameters or groups of them; every one that requires grad must be included; None: all
    defaults: the settings of optimizer_class

    Use it like `optimizer_class`: schedulers, GradScaler, closures and `state_dict()` work. The results are those of
    `optimizer_class` without shards, bit for bit if the collectives add in the same order. All ranks make the same
    calls: `step`, `clip_grad_norm_`, `unscale_gradients` and `state_dict` are collective. Without micro_batches no rank
    has whole gradients, so reading `param.grad` raises, and `zero.clip_grad_norm_` clips the gradients. With
    micro_batches reading raises as well. Parameters are stored in flat arrays. When the plan of buckets changes, as in
    the first backwards, they move to new arrays. A view (`p.detach()`) that was made before such a change keeps the old
    memory.

    Raises: DtypeError if the model is not a DataParallel, or the class not an optimizer; ArgumentError for missing
    parameters, and for those of another model; ParallelError if the model has a communication hook or a ZeroOptimizer
    already; what `optimizer_class` raises.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, §5.1.
    """

    _sealed = False  # True when the groups are complete
    found_inf: Any = None  # a GradScaler sets it around a step: see `ddp.optim.formula_optimizer.FormulaOptimizer`

    def __init__(
        self, model: DataParallel, optimizer_class: type[Optimizer], params: Params | None = None, **defaults: Any
    ) -> None:
        if not isinstance(model, DataParallel):
            raise DtypeError(f"ZeroOptimizer: expected a DataParallel, got {type(model).__name__}")
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise DtypeError(f"ZeroOptimizer: expected a class of optimizers, got {optimizer_class!r}")
        reducer = model.reducer
        if not isinstance(reducer.exchange, AllReduce | SingleRank | TreeExchange):
            has = "ZeroOptimizer" if isinstance(reducer.exchange, ShardedExchange) else "communication hook"
            raise ParallelError(
                f"ZeroOptimizer: this model has a {has}, and its gradients are reduced in one way: call model.close() "
                "and wrap the module anew"
            )
        by_leaf = {p.leaf: p for p in model.module.parameters()}
        named = dict(zip(reducer.names, [by_leaf[leaf] for leaf in reducer.leaves], strict=True))
        whole = optimizer_class(list(named.values()) if params is None else params, **defaults)
        super().__init__([_with_names(group) for group in whole.param_groups], whole.defaults)
        self._sealed = True
        self._model = model
        self._comm = reducer.comm
        self._kind = optimizer_class
        arguments = self._comm, optimizer_class, defaults, self.param_groups, named
        tree = reducer.tree
        self._shards = ShardedExchange(*arguments) if tree is None else WholeGradientExchange(tree, *arguments)
        self._device = self._shards.params[0].device
        self._check_params(named)
        self._step_supports_amp_scaling = getattr(optimizer_class, "_step_supports_amp_scaling", False)
        self._scaled = False  # whether the means were clipped or unscaled, but not the sums in the buckets
        reducer.before.insert(0, self._before_backward)
        reducer.set_exchange(self._shards)

    def __repr__(self) -> str:
        return super().__repr__().replace(" (", f" of {self._kind.__name__} (", 1)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group while the optimizer is being made. Raises: ArgumentError afterwards."""
        if self._sealed:
            raise ArgumentError(
                "ZeroOptimizer: groups are given when it is made; frozen parameters may be among them, and are trained "
                "once they require grad"
            )
        super().add_param_group(param_group)

    def step(self, closure: Closure | None = None) -> Any:
        """Updates this rank's part of the parameters, and gathers the parts of the other ranks. Collective.

        While the parameters of a bucket are gathered, the next bucket is updated. A parameter whose grad is None is not
        updated; backward leaves None on all ranks or on none.

        closure: computes the loss and its gradients again; step returns its result

        Raises: ParallelError for gradients that were not reduced: those that were accumulated inside `no_sync()` since
        the last reduction, assigned, or made before this optimizer; also after `close` of the model. CaptureError in a
        CUDA graph.
        """
        if capturing.now is not None:
            raise CaptureError("ZeroOptimizer gathers parameters that other ranks have updated, and no graph does yet")
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        self._check_reduced("step")
        self._shards.step(self.found_inf)
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients so that the norm of all of them, as one vector, is at most `max_norm`. Collective.

        norm_type: inf, or a finite number other than 0
        Returns: the norm before scaling, 0-d, equal on all ranks. Without micro_batches it takes one small collective,
        and numbers are added in another order than by `nn.utils.clip_grad_norm_`, so the last bits may differ

        Raises: ArgumentError for another norm_type, and with error_if_nonfinite for a norm that is infinite or nan;
        then nothing has changed. ParallelError for gradients that have not been reduced, and after `close` of the
        model.
        """
        order = norm_order(norm_type)
        self._check_reduced("clip_grad_norm_")
        with errstate(all="ignore"), on(self._device):
            return self._clip(float(max_norm), order, error_if_nonfinite)

    def unscale_gradients(self, scale: Any, found_inf: Any) -> None:
        """Divides the gradients by `scale`, for GradScaler. With NCCL the host does not wait for the GPU. Collective.

        scale, found_inf: (1,) float32; found_inf is set to 1 if any gradient on any rank is infinite or nan, else to 0

        Raises: ParallelError for gradients that have not been reduced, and after `close` of the model.
        """
        self._check_reduced("unscale_")
        xp = self._device.xp
        with errstate(all="ignore"), on(self._device):
            non_finite = xp.zeros(1, np.float32)
            every = [*self._shards.gradients(), *self._whole_gradients()]
            gradients.unscale(xp, every, to_device(scale, self._device), non_finite)
            self._comm.all_reduce(non_finite, op="max", out=non_finite)
        found_inf[...] = to_device(non_finite, device_of(found_inf))
        self._scaled = True

    def state_dict(self) -> dict[str, Any]:
        """The state dict that `optimizer_class` would have for the same parameters. Collective.

        Every rank gets the whole state.
        """
        return {**super().state_dict(), "state": self._shards.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the settings, and this rank's part of the state. All ranks load the same state dict.

        As in `Optimizer.load_state_dict`, tensors keep their dtype, and parameters that have names are matched by name.
        state_dict: of a ZeroOptimizer on any number of ranks, of `optimizer_class`, or of PyTorch's optimizer of that
        name, with its tensors or with NumPy arrays

        Raises: StateDictError if groups or shapes do not fit this optimizer, or "state" or "param_groups" is missing;
        then nothing has changed.
        """
        groups = self._groups_in_own_order(state_dict)
        saved = {
            number: {name: from_foreign(value) if hasattr(value, "detach") else value for name, value in entry.items()}
            for number, entry in state_dict["state"].items()
        }
        saved_numbers = [number for group in groups for number in group["params"]]
        state = {
            number: saved[saved_number] for number, saved_number in enumerate(saved_numbers) if saved_number in saved
        }
        self._shards.check_state(state)
        pieces = self._shards.split_state(state)
        super().load_state_dict({**state_dict, "state": {}})
        self._shards.put_pieces(pieces)

    def state_pieces(self) -> Iterator[StatePiece]:
        """The state on this rank, as (number of a parameter, start, stop, state).

        The state is that of elements start to stop of the flattened parameter. Each rank can save its own part, so that
        no rank ever holds the whole state. Not collective. Elementwise states are flat tensors of stop - start
        elements, or of the parameter's shape if it has one element; they share the optimizer's memory. Any other state
        is equal for all pieces of a parameter.
        """
        return self._shards.pieces()

    def state_ranges(self) -> Iterator[tuple[int, int, int]]:
        """(number of the parameter, start, stop) of all pieces that `load_state_pieces` needs on this rank."""
        return self._shards.ranges()

    def load_state_pieces(self, param_groups: list[Group], find: FindState) -> None:
        """Loads the settings, and this rank's part of the state, as saved on any number of ranks.

        param_groups: as in `state_dict`; find: called with the number of a parameter, start and stop, returns the state
        of these elements: tensors as in `state_pieces` and single values, or {}

        Raises: StateDictError if the groups do not fit this optimizer; what `find` raises. Then nothing has changed.
        """
        state_dict = {"state": {}, "param_groups": param_groups}
        self._groups_in_own_order(state_dict)
        pieces = self._shards.read_pieces(find)
        super().load_state_dict(state_dict)
        self._shards.put_pieces(pieces)

    def _clip(self, max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        xp = self._device.xp
        parts = self._shards.gradients()
        whole = self._whole_gradients()
        if self._model.micro_batches is not None:
            norm = gradients.total_norm(xp, whole, order) if whole else xp.zeros(())
        else:
            part_norm = gradients.total_norm(xp, parts, order, root=False) if parts else xp.zeros(())
            # Each rank combines the norms of all ranks in rank order: the result is equal on all, and nan if one is.
            norms = self._comm.all_gather(part_norm.astype(np.float64).reshape(1), lengths="equal")
            norm = norms.max() if order == math.inf else norms.sum() ** (1 / order)
        wide = any(p.array.dtype == np.float64 for p in self._shards.params if p.leaf.grad_buffer.full)
        total = xp.asarray(norm, np.float64 if wide else np.float32)
        if error_if_nonfinite and not xp.isfinite(total):
            raise ArgumentError(
                f"the total norm of order {order} is {float(total)}, so gradients cannot be clipped by it; "
                "pass error_if_nonfinite=False to scale by it nevertheless"
            )
        gradients.scale_to_norm(xp, [*parts, *whole], total, max_norm)
        self._scaled = True
        return wrap(total, self._device)

    def _whole_gradients(self) -> list[Any]:
        """With micro_batches: all mean gradients. Every rank has them, and a copy of its own part. Otherwise: []."""
        if self._model.micro_batches is None:
            return []
        buffers = [p.leaf.grad_buffer for p in self._shards.params]
        return [buffer.array for buffer in buffers if buffer.full]

    def _check_params(self, named: Mapping[str, Tensor]) -> None:
        for p in self._shards.params:
            if id(p) not in self._shards.names:
                raise ArgumentError(f"ZeroOptimizer: a tensor of shape {p.shape} is no parameter of the model")
        listed = set(map(id, self._shards.params))
        missing = [name for name, p in named.items() if p.requires_grad and id(p) not in listed]
        if missing:
            raise ArgumentError(
                f"ZeroOptimizer: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''} would not be trained: "
                "give every parameter that requires grad, or freeze it"
            )

    def _check_reduced(self, call: str) -> None:
        self._model.check_open()
        for p in self._shards.params:
            grad_buffer = p.leaf.grad_buffer
            if grad_buffer.state is FULL and grad_buffer.read_error is None:
                raise ParallelError(
                    f"ZeroOptimizer.{call}: the gradient of {self._shards.names[id(p)]} has not been reduced: it was "
                    "added up inside no_sync(), assigned, or is older than this optimizer. A synchronized backward "
                    "comes first"
                )

    def _before_backward(self) -> None:
        if self._scaled:
            for p in self._shards.params:
                grad_buffer = p.leaf.grad_buffer
                if grad_buffer.full and grad_buffer.read_error is not None:
                    raise ParallelError(
                        f"backward would add to the gradient of {self._shards.names[id(p)]}, of which ZeroOptimizer "
                        "has scaled the mean alone: call zero_grad() after the step, or accumulate inside no_sync() "
                        "first"
                    )
            self._scaled = False


def _with_names(group: Group) -> Group:
    """The group as an argument of an optimizer: parameters that have names become (name, parameter)."""
    names = group.get("param_names")
    return group if names is None else {**group, "params": list(zip(names, group["params"], strict=True))}
