"""`ZeroOptimizer`: every rank keeps the optimizer's state of its own part of the parameters, and updates that part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy import errstate

from ddp._device import capturing, device_of, on, to_device
from ddp._engine import enable_grad
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
from ddp.parallel.zero.shards import ShardedExchange, WholeGradientExchange


class ZeroOptimizer(Optimizer):
    """An optimizer whose state is sharded over the ranks of a DataParallel: ZeRO, stage 1.

    model: its gradients are reduce-scattered from now on, each rank gets the mean of its own part; with micro_batches
    each rank still gets all of them
    optimizer_class: any of `ddp.optim`, or one of your own whose update treats each element alone, and which keeps what
    it remembers in `self.state[p]`: it is given flat pieces of parameters
    params: the model's parameters, each that requires grad once, or groups of them; None: all
    defaults: the settings of optimizer_class

    Use it like that optimizer: schedulers, GradScaler, closures and `state_dict()` work. Where collectives add in the
    same order its numbers are the same, bit for bit. All ranks make the same calls: `step`, `clip_grad_norm_` and
    `state_dict` are collective. Gradients cannot be read, since no rank has whole ones: `param.grad` raises, and
    clipping is `zero.clip_grad_norm_`. Parameters lie in flat memory, and move when the plan of buckets changes, as it
    does in the first backwards: a view (`p.detach()`) that was made before is left behind.

    Raises: DtypeError if the class is no optimizer; ArgumentError for parameters that are not the model's, or are
    missing; ParallelError if the model has a communication hook or a ZeroOptimizer already.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, §5.1.
    """

    _sealed = False  # the groups are complete
    found_inf: Any = None  # see `ddp.optim.formula_optimizer.FormulaOptimizer`

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
        self._model, self._comm, self._kind = model, reducer.comm, optimizer_class
        shared = self._comm, optimizer_class, defaults, self.param_groups, named
        tree = reducer.tree
        self._shards = ShardedExchange(*shared) if tree is None else WholeGradientExchange(tree, *shared)
        self._where = self._shards.params[0].device
        self._check_params(named)
        self._step_supports_amp_scaling = getattr(optimizer_class, "_step_supports_amp_scaling", False)
        self._scaled = False  # gradients are no longer what the buckets add up to: they were clipped, or unscaled
        reducer.before.insert(0, self._before_backward)
        reducer.set_exchange(self._shards)

    def __repr__(self) -> str:
        return super().__repr__().replace(" (", f" of {self._kind.__name__} (", 1)

    def add_param_group(self, param_group: Group) -> None:
        """Raises: ArgumentError once the optimizer is made."""
        if self._sealed:
            raise ArgumentError(
                "ZeroOptimizer: groups are given when it is made; frozen parameters may be among them, and are trained "
                "once they require grad"
            )
        super().add_param_group(param_group)

    def step(self, closure: Closure | None = None) -> Any:
        """Updates this rank's part of the parameters, and gathers the other ranks'. Collective.

        While the parameters of a bucket are gathered the next bucket is updated. A parameter whose grad is None is not
        touched; it must be None on all ranks, as backward leaves it.

        closure: computes the loss and its gradients anew; step returns what it returns

        Raises: ParallelError if a gradient was added up inside `no_sync()` alone, or assigned; CaptureError in a CUDA
        graph.
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
        """Scales the gradients so that their norm, taken together as one vector, is at most `max_norm`. Collective.

        Returns the norm that they had, 0-d, the same on every rank. It takes one small call, and adds up in another
        order than `nn.utils.clip_grad_norm_`, so that the last bits may differ.
        norm_type: inf, or a number other than 0

        Raises: ArgumentError for another norm_type, or, if asked to, for a norm that is infinite or nan; nothing has
        changed then. ParallelError for gradients that have not been reduced.
        """
        max_norm, norm_type = float(max_norm), norm_order(norm_type)
        self._check_reduced("clip_grad_norm_")
        with errstate(all="ignore"), on(self._where):
            return self._clip(max_norm, norm_type, error_if_nonfinite)

    def unscale_gradients(self, scale: Any, found: Any) -> None:
        """Divides the gradients by `scale`, for GradScaler; on a GPU nothing waits. Collective.

        scale, found: (1,) float32; found becomes 1 where one of the gradients, on any rank, is infinite or nan

        Raises: ParallelError for gradients that have not been reduced.
        """
        self._check_reduced("unscale_")
        with errstate(all="ignore"), on(self._where):
            mine = self._where.xp.zeros(1, np.float32)
            gradients.unscale(self._where.xp, self._shards.gradients(), to_device(scale, self._where), mine)
            self._comm.all_reduce(mine, op="max", out=mine)
        found[...] = to_device(mine, device_of(found))
        self._scaled = True

    def state_dict(self) -> dict[str, Any]:
        """What `optimizer_class` over the same parameters would give, on every rank. Collective.

        Each rank holds the whole state while it keeps the result.
        """
        return {**super().state_dict(), "state": self._shards.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over settings, and this rank's part of the state. All ranks load the same.

        See `Optimizer.load_state_dict`: dtypes stay, and parameters that have names are matched by name.
        state_dict: of a ZeroOptimizer of any number of ranks, or of `optimizer_class`, or PyTorch's of that name, with
        its tensors or NumPy arrays

        Raises: StateDictError if groups or shapes are not those of this optimizer.
        """
        super().load_state_dict({**state_dict, "state": {}} if "state" in state_dict else state_dict)
        saved = {
            number: {name: from_foreign(value) if hasattr(value, "detach") else value for name, value in entry.items()}
            for number, entry in state_dict["state"].items()
        }
        groups = self._in_own_order(state_dict["param_groups"])
        given = [number for group in groups for number in group["params"]]
        self._shards.put_state({own: saved[theirs] for own, theirs in enumerate(given) if theirs in saved})

    def state_pieces(self) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
        """(parameter's number, start, stop, its state there) of what this rank holds; parameters thought of as flat.

        For a checkpoint that each rank writes its own part of: no rank ever holds the whole state, and nothing is
        called. A state with an element for each of the piece's is the part of it that belongs to them; it shares the
        optimizer's memory. Anything else is the same for all pieces of a parameter.
        """
        return self._shards.pieces()

    def state_ranges(self) -> Iterator[tuple[int, int, int]]:
        """(parameter's number, start, stop) of everything that `load_state_pieces` will ask for on this rank."""
        return self._shards.ranges()

    def load_state_pieces(self, param_groups: list[Group], find: Callable[[int, int, int], Mapping[str, Any]]) -> None:
        """Takes over settings, and this rank's part of the state, at any number of ranks.

        param_groups: as `state_dict` has them; find: called with a parameter's number, start and stop, returns its
        state there: flat tensors of stop - start elements and single values, or {}

        Raises: StateDictError if groups are not those of this optimizer.
        """
        super().load_state_dict({"state": {}, "param_groups": param_groups})
        self._shards.put_pieces(find)

    def _clip(self, max_norm: float, p: float, error_if_nonfinite: bool) -> Tensor:
        parts, xp = self._shards.gradients(), self._where.xp
        full: list[Any] = [each.leaf.grad_buffer.array for each in self._shards.params if each.leaf.grad_buffer.full]
        if self._model.micro_batches is not None:  # where they lie whole on every rank
            whole = gradients.total_norm(xp, full, p) if full else xp.zeros(())
        else:
            mine = gradients.total_norm(xp, parts, p, root=False) if parts else xp.zeros(())
            # Gathered, and combined by each rank for itself: MPI's maximum may lose a nan.
            everyones = self._comm.all_gather(mine.astype(np.float64).reshape(1), lengths="equal")
            whole = everyones.max() if p == math.inf else everyones.sum() ** (1 / p)
        wide = [each.dtype for each in full]
        total = xp.asarray(whole, np.float64 if np.dtype(np.float64) in wide else np.float32)
        if error_if_nonfinite and not xp.isfinite(total):
            raise ArgumentError(
                f"the total norm of order {p} is {float(total)}, so gradients cannot be clipped by it; "
                "pass error_if_nonfinite=False to scale by it nevertheless"
            )
        gradients.scale_to_norm(xp, parts, total, max_norm)
        self._scaled = True
        return wrap(total, self._where)

    def _check_params(self, named: Mapping[str, Tensor]) -> None:
        for p in self._shards.params:
            if id(p) not in self._shards.names:
                raise ArgumentError(f"ZeroOptimizer: a tensor of shape {p.shape} is no parameter of the model")
        listed = {id(p) for p in self._shards.params}
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
            if grad_buffer.full and grad_buffer.withheld is None and not grad_buffer.zeroed:
                raise ParallelError(
                    f"ZeroOptimizer.{call}: the gradient of {self._shards.names[id(p)]} has not been reduced: it was "
                    "added up inside no_sync(), assigned, or is older than this optimizer. A synchronized backward "
                    "comes first"
                )

    def _before_backward(self) -> None:
        if self._scaled:
            for p in self._shards.params:
                if p.leaf.grad_buffer.full and p.leaf.grad_buffer.withheld is not None:
                    raise ParallelError(
                        f"backward would add to the gradient of {self._shards.names[id(p)]}, of which ZeroOptimizer "
                        "has scaled the mean alone: call zero_grad() after the step, or accumulate inside no_sync() "
                        "first"
                    )
            self._scaled = False


def _with_names(group: Group) -> Group:
    """The group as it is given to an optimizer, its parameters with their names if they have any."""
    names = group.get("param_names")
    return {**group, "params": group["params"] if names is None else list(zip(names, group["params"], strict=True))}
